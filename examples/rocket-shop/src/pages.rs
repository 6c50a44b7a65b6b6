//! The pages of the outbox at `/admin/outbox`, for staff of the shop. They wait for the database, so other
//! requests leave the thread meanwhile (`block_in_place`).

use std::io::Cursor;
use std::sync::Arc;

use diesel_outbox_pages::{Pages, serve};
use rocket::data::ToByteUnit;
use rocket::http::Method::{Delete, Get, Patch, Post};
use rocket::http::Status;
use rocket::route::{Handler, Outcome, Route};
use rocket::tokio::task::block_in_place;
use rocket::{Data, Request, Response, async_trait};

use crate::staff::Login;

#[derive(Clone)]
struct Mounted(Arc<Pages>, Login);

#[async_trait]
impl Handler for Mounted {
    async fn handle<'r>(&self, request: &'r Request<'_>, data: Data<'r>) -> Outcome<'r> {
        let Some(staff) = self.1.check(request) else {
            return Outcome::Success(Login::required());
        };
        let Ok(body) = data.open(1.mebibytes()).into_bytes().await else {
            return Outcome::Error(Status::BadRequest);
        };
        let headers = request.headers().iter().map(|one| (one.name, one.value));
        let (method, target) = (request.method().as_str(), request.uri().to_string());
        let respond = |asked| self.0.respond(asked, staff);
        let answer = || serve(method, &target, headers, body.as_slice(), respond);
        let (status, headers, body) = block_in_place(answer);
        let mut response = Response::build();
        response.status(Status::new(status));
        response.sized_body(body.len(), Cursor::new(body));
        for (name, value) in headers {
            response.raw_header(name, value);
        }
        Outcome::Success(response.finalize())
    }
}

pub fn routes(pages: Pages, login: Login) -> Vec<Route> {
    let mounted = Mounted(Arc::new(pages), login);
    let route = |method| Route::new(method, "/<_..>", mounted.clone());
    [Get, Post, Patch, Delete].map(route).into()
}

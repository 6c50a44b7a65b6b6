//! The pages of the outbox at `/admin/outbox`, for staff of the shop. They wait for the database, so they answer on a
//! thread that may block.

use std::io::Cursor;
use std::sync::Arc;

use diesel_outbox_pages::Pages;
use rocket::data::ToByteUnit;
use rocket::http::Method::{Delete, Get, Patch, Post};
use rocket::http::Status;
use rocket::route::{Handler, Outcome, Route};
use rocket::tokio::task::spawn_blocking;
use rocket::{Data, Request, Response, async_trait};

use crate::staff::Login;

#[derive(Clone)]
pub struct Mounted(pub Arc<Pages>, pub Login);

#[async_trait]
impl Handler for Mounted {
    async fn handle<'r>(&self, request: &'r Request<'_>, data: Data<'r>) -> Outcome<'r> {
        let Some(staff) = self.1.check(request) else {
            return Outcome::Success(Login::required());
        };
        let mut asked = http::Request::builder()
            .method(request.method().as_str())
            .uri(request.uri().to_string());
        for header in request.headers().iter() {
            asked = asked.header(header.name().as_str(), header.value());
        }
        let body = data.open(256.kibibytes()).into_bytes().await;
        let body = body.ok().filter(|body| body.is_complete());
        let Some(Ok(asked)) = body.map(|body| asked.body(body.into_inner())) else {
            return Outcome::Error(Status::BadRequest);
        };
        let pages = Arc::clone(&self.0);
        let Ok(answer) = spawn_blocking(move || pages.respond(asked, staff)).await else {
            return Outcome::Error(Status::InternalServerError);
        };
        let (head, body) = answer.into_parts();
        let mut response = Response::build();
        response.status(Status::new(head.status.as_u16()));
        for (name, value) in &head.headers {
            let value = String::from_utf8_lossy(value.as_bytes());
            response.raw_header(name.to_string(), value.into_owned());
        }
        response.sized_body(body.len(), Cursor::new(body));
        Outcome::Success(response.finalize())
    }
}

impl From<Mounted> for Vec<Route> {
    fn from(mounted: Mounted) -> Self {
        let route = |method| Route::new(method, "/<_..>", mounted.clone());
        [Get, Post, Patch, Delete].map(route).into()
    }
}

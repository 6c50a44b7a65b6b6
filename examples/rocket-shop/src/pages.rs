//! The pages of the outbox at `/admin/outbox`, for staff of the shop.

use std::io::Cursor;
use std::sync::Arc;

use diesel_outbox_pages::{Pages, Visitor};
use rocket::data::ToByteUnit;
use rocket::http::{Method, Status};
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
        let answer = answer(Arc::clone(&self.0), staff, request, data).await;
        answer.map_or(Outcome::Error(Status::BadRequest), Outcome::Success)
    }
}

async fn answer(
    pages: Arc<Pages>,
    visitor: Visitor,
    request: &Request<'_>,
    data: Data<'_>,
) -> Option<Response<'static>> {
    let mut asked = http::Request::builder()
        .method(request.method().as_str())
        .uri(request.uri().to_string());
    for header in request.headers().iter() {
        asked = asked.header(header.name().as_str(), header.value());
    }
    let form = data.open(256.kibibytes()).into_bytes().await.ok()?;
    let form = form.is_complete().then(|| form.into_inner())?;
    let asked = asked.body(form).ok()?;
    // The pages wait for the database.
    let answer = spawn_blocking(move || pages.respond(asked, visitor));
    let (head, body) = answer.await.ok()?.into_parts();
    let mut response = Response::build();
    response.status(Status::new(head.status.as_u16()));
    for (name, value) in &head.headers {
        response.raw_header(name.to_string(), value.to_str().ok()?.to_owned());
    }
    response.sized_body(body.len(), Cursor::new(body));
    Some(response.finalize())
}

impl From<Mounted> for Vec<Route> {
    fn from(mounted: Mounted) -> Self {
        let route = |method| Route::new(method, "/<_..>", mounted.clone());
        [Method::Get, Method::Post].map(route).into()
    }
}

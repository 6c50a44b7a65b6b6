//! The pages of the outbox: at `/admin/outbox` for staff of the shop, and at `/webhooks` for its customers. They wait for
//! the database, so other requests leave the thread meanwhile (`block_in_place`).

use std::io::Cursor;
use std::net::Ipv4Addr;
use std::sync::Arc;

use diesel_outbox_pages::{Pages, Portal, Rights, Visitor, serve};
use rocket::data::ToByteUnit;
use rocket::http::Method::{Delete, Get, Patch, Post};
use rocket::http::Status;
use rocket::route::{Handler, Outcome, Route};
use rocket::tokio::task::block_in_place;
use rocket::{Data, Request, Response, async_trait};

use crate::staff::Staff;

/// Rocket's Shield sets these itself, and warns of each response that has them. The policy of the pages refuses frames, too.
const SET_BY_SHIELD: [&str; 2] = ["x-content-type-options", "x-frame-options"];

#[derive(Clone)]
pub enum Mounted {
    ForStaff(Arc<Pages>),
    ForCustomers(Arc<Portal>),
}

#[async_trait]
impl Handler for Mounted {
    async fn handle<'r>(&self, request: &'r Request<'_>, data: Data<'r>) -> Outcome<'r> {
        let peer = request.client_ip().unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let visitor = match (self, Staff::of(request)) {
            (Self::ForStaff(_), Some(staff)) => Visitor::known(staff.name, Rights::all()),
            (Self::ForStaff(_), None) => return Outcome::Error(Status::Unauthorized),
            // The portal itself knows those who opened a link.
            (Self::ForCustomers(_), _) => Visitor::unknown(peer),
        };
        let Ok(body) = data.open(1.mebibytes()).into_bytes().await else {
            return Outcome::Error(Status::BadRequest);
        };
        let headers = request.headers().iter().map(|one| (one.name, one.value));
        let (method, target) = (request.method().as_str(), request.uri().to_string());
        let respond = |asked| match self {
            Self::ForStaff(pages) => pages.respond(asked, visitor),
            Self::ForCustomers(portal) => portal.respond(asked, visitor),
        };
        let answer = || serve(method, &target, headers, body.as_slice(), respond);
        let (status, headers, body) = block_in_place(answer);
        let mut response = Response::build();
        response.status(Status::new(status));
        response.sized_body(body.len(), Cursor::new(body));
        for (name, value) in headers {
            if !SET_BY_SHIELD.contains(&name.to_lowercase().as_str()) {
                response.raw_header_adjoin(name, value);
            }
        }
        Outcome::Success(response.finalize())
    }
}

impl From<Mounted> for Vec<Route> {
    fn from(mounted: Mounted) -> Self {
        let route = |method| Route::new(method, "/<_..>", mounted.clone());
        [Get, Post, Patch, Delete].map(route).into()
    }
}

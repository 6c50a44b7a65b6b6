//! The login of the shop's staff: any name, and the password.

use base64::prelude::{BASE64_STANDARD, Engine};
use diesel_outbox_pages::{Rights, Visitor};
use rocket::http::Status;
use rocket::{Request, Response};

#[derive(Clone)]
pub struct Login {
    pub password: String,
}

impl Login {
    /// The visitor, if staff of the shop.
    pub fn check(&self, request: &Request<'_>) -> Option<Visitor> {
        let given = request.headers().get_one("authorization")?;
        let given = BASE64_STANDARD.decode(given.strip_prefix("Basic ")?).ok()?;
        let given = String::from_utf8(given).ok()?;
        let (name, password) = given.split_once(':')?;
        let visitor = || Visitor::known(name, Rights::all());
        (password == self.password).then(visitor)
    }

    /// Makes a browser ask for name and password.
    pub fn required() -> Response<'static> {
        let mut response = Response::build();
        response.status(Status::Unauthorized);
        response.raw_header("www-authenticate", "Basic realm=\"shop\"");
        response.finalize()
    }
}

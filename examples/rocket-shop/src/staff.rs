//! The login of the shop's staff, any name and the password, and what only staff can do.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use diesel_outbox_pages::Portal;
use rocket::http::{Header, Status};
use rocket::request::{FromRequest, Outcome};
use rocket::serde::uuid::Uuid;
use rocket::{Request, Responder, State, catch, post};

const HOUR: Duration = Duration::from_secs(3600);

/// The password of the staff.
pub struct Password(pub String);

/// Somebody of the staff.
pub struct Staff {
    pub name: String,
}

impl Staff {
    pub fn of(request: &Request<'_>) -> Option<Self> {
        let given = request.headers().get_one("authorization")?;
        let given = BASE64_STANDARD.decode(given.strip_prefix("Basic ")?).ok()?;
        let given = String::from_utf8(given).ok()?;
        let (name, password) = given.split_once(':')?;
        let name = name.to_owned();
        let is_staff = *password == request.rocket().state::<Password>()?.0;
        is_staff.then_some(Self { name })
    }
}

#[rocket::async_trait]
impl<'r> FromRequest<'r> for Staff {
    type Error = Option<Infallible>;

    async fn from_request(request: &'r Request<'_>) -> Outcome<Self, Self::Error> {
        match Self::of(request) {
            Some(staff) => Outcome::Success(staff),
            None => Outcome::Error((Status::Unauthorized, None)),
        }
    }
}

/// Makes a browser ask for name and password.
#[derive(Responder)]
#[response(status = 401)]
pub struct LoginRequired(&'static str, Header<'static>);

#[catch(401)]
pub fn login_required() -> LoginRequired {
    let ask = Header::new("www-authenticate", "Basic realm=\"shop\"");
    LoginRequired("log in\n", ask)
}

/// The path that opens the portal for a customer. Staff gives it to the customer.
#[post("/customers/<customer>/webhooks")]
pub fn link(_staff: Staff, customer: Uuid, portal: &State<Arc<Portal>>) -> String {
    portal.link(customer, HOUR)
}

//! The web page at `/`: a chat with live metrics. It loads nothing from other servers.

use axum::{
    http::{HeaderName, header},
    response::IntoResponse,
};

/// The page may load from and connect to this server only.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
    base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

pub(crate) async fn html() -> impl IntoResponse {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

pub(crate) async fn style() -> impl IntoResponse {
    file("text/css; charset=utf-8", include_str!("page/page.css"))
}

/// The scripts of the page by their paths, those of others included.
pub(crate) const SCRIPTS: [(&str, &str); 5] = [
    ("/page.js", include_str!("page/page.js")),
    ("/conversations.js", include_str!("page/conversations.js")),
    ("/markdown.js", include_str!("page/markdown.js")),
    ("/marked.js", include_str!("page/vendor/marked.js")),
    ("/purify.js", include_str!("page/vendor/purify.js")),
];

/// A script of the page.
pub(crate) fn script(text: &'static str) -> impl IntoResponse {
    file("text/javascript; charset=utf-8", text)
}

fn file(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 4] = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // A newer server may have a newer page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text)
}

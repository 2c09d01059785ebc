//! Ports for processes that must know one before they listen at it.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// The ports that are tried. No system that tests run on gives them to a program that asks for any port, so nothing
/// takes one between its choice and its use.
const FIRST: u16 = 12_000;
const COUNT: u16 = 16_000;

/// A port of the loopback interface at which nothing listens, different at each call.
///
/// # Panics
/// If something listens at every port that may be tried.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test programs that run at the same time begin at other ports.
    let start = (std::process::id() % u32::from(COUNT)) as u16;
    (0..COUNT)
        .map(|_| FIRST + (start + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT)
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a port is free")
}

//! Access control: API keys, and the rate of requests of each client.

use super::error::ApiError;
use anyhow::{Context, Result, bail};
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    fmt,
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};
use subtle::ConstantTimeEq;

/// The path of the metrics, which may have keys of their own.
pub(super) const METRICS: &str = "/metrics";

/// The most clients whose rate is kept at a time. Beyond it, the clients that have been idle longest are forgotten.
const MAX_CLIENTS: usize = 65_536;

/// The client that a request is counted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClientId {
    /// The holder of the API key with this index.
    Key(usize),
    /// All requests from this address, or for IPv6 from its network of 64 bits: a client can have as many addresses of that as it
    /// likes.
    Address(IpAddr),
}

impl ClientId {
    /// The client at an address.
    fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        })
    }
}

/// The API keys of a server.
pub(crate) struct ApiKeys {
    keys: Vec<Key>,
}

struct Key {
    /// The hash of the key: comparing hashes takes equally long for every wrong key, whatever its length.
    hash: [u8; 32],
    rights: Rights,
}

/// What the holder of a key may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Rights {
    /// Send requests of a priority above 0.
    priority: bool,
    /// Read the metrics, and nothing else.
    metrics: bool,
}

impl Key {
    /// Reads a key, and the rights that follow it after blanks.
    fn parse(text: &str) -> Result<Self> {
        let mut words = text.split_whitespace();
        let key = words.next().unwrap_or_default();
        let mut rights = Rights::default();
        for word in words {
            // The key itself is not shown.
            match word {
                "priority" => rights.priority = true,
                "metrics" => rights.metrics = true,
                word => {
                    bail!("an API key is followed by `{word}`, but the rights are `priority` and `metrics`")
                }
            }
        }
        if rights.priority && rights.metrics {
            bail!(
                "an API key has the rights `priority` and `metrics`, but one with `metrics` reads the metrics only"
            );
        }
        Ok(Self { hash: Sha256::digest(key.as_bytes()).into(), rights })
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ApiKeys({})", self.keys.len())
    }
}

impl ApiKeys {
    /// These keys, each with its rights; without keys, access is open.
    ///
    /// # Errors
    /// If a right does not exist, or all keys are for the metrics only.
    pub(crate) fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let keys = keys.into_iter().map(Key::parse).collect::<Result<Vec<_>>>()?;
        if !keys.is_empty() && keys.iter().all(|key| key.rights.metrics) {
            bail!(
                "all API keys have the right `metrics`, so nobody could send requests: add a key without it"
            );
        }
        Ok(Self { keys })
    }

    /// The given keys, those of a file, one per line, and those of a list separated by commas. Empty lines and lines that start with
    /// `#` are skipped.
    ///
    /// # Errors
    /// If the file cannot be read, or a source of keys has no key; as [`Self::new`].
    pub(crate) fn load(file: Option<&Path>, list: Option<&str>, given: &[String]) -> Result<Self> {
        let mut keys = given.to_vec();
        if keys.iter().any(|key| key.trim().is_empty()) {
            bail!("--api-key is empty: give a key, or leave it out for open access");
        }
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("the API keys in {} cannot be read", path.display()))?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
            keys.extend(lines.map(str::to_owned));
        }
        if let Some(list) = list {
            keys.extend(list.split(',').map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned));
        }
        // A source of keys without keys is a mistake, not a wish for open access.
        if keys.is_empty() && (file.is_some() || list.is_some()) {
            bail!(
                "the API key file and DSRUN_API_KEYS have no keys: add one, or leave both out for open access"
            );
        }
        Self::new(keys.iter().map(String::as_str))
    }

    /// Whether access is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The rights of a client; without keys, everyone has the right to set priorities.
    fn rights(&self, client: ClientId) -> Rights {
        match client {
            ClientId::Key(index) => self.keys.get(index).map_or_else(Rights::default, |key| key.rights),
            ClientId::Address(_) => Rights { priority: true, metrics: false },
        }
    }

    /// Checks that a client may send requests of a priority.
    ///
    /// # Errors
    /// If the priority is above 0, and the client's key does not have the right to it.
    pub(crate) fn check_priority(&self, client: ClientId, priority: i32) -> Result<(), ApiError> {
        if priority > 0 && !self.rights(client).priority { Err(ApiError::no_priority()) } else { Ok(()) }
    }

    /// Checks that a client may use a path.
    ///
    /// # Errors
    /// If its key is for the metrics and this is another path, or if these have keys of their own and this is another key.
    pub(crate) fn check_path(&self, client: ClientId, path: &str) -> Result<(), ApiError> {
        match (self.rights(client).metrics, path == METRICS) {
            (true, false) => Err(ApiError::not_allowed("this API key may read /metrics and nothing else")),
            (false, true) if self.keys.iter().any(|key| key.rights.metrics) => {
                Err(ApiError::not_allowed("/metrics is only for API keys with the right `metrics`"))
            }
            _ => Ok(()),
        }
    }

    /// Identifies the client of a request.
    ///
    /// # Errors
    /// If there are keys, and the request has none of them.
    pub(crate) fn identify(&self, headers: &HeaderMap, address: IpAddr) -> Result<ClientId, ApiError> {
        if self.keys.is_empty() {
            return Ok(ClientId::at(address));
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        // Clients of Anthropic's API send the key in a header of its own.
        let own = headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii());
        // Every key is compared, even after a match, so that the time does not depend on the key.
        let mut found = None;
        for given in [bearer, own].into_iter().flatten() {
            let given: [u8; 32] = Sha256::digest(given).into();
            for (index, key) in self.keys.iter().enumerate() {
                if bool::from(key.hash.ct_eq(&given)) {
                    found = Some(ClientId::Key(index));
                }
            }
        }
        found.ok_or_else(ApiError::no_key)
    }
}

/// The key in `Bearer KEY`.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Limits the requests of each client per minute. The whole allowance may be used in one burst.
#[derive(Debug)]
pub(crate) struct RateLimit {
    per_minute: f64,
    clients: Mutex<HashMap<ClientId, Allowance>>,
}

#[derive(Clone, Copy, Debug)]
struct Allowance {
    /// Requests left.
    left: f64,
    at: Instant,
}

impl RateLimit {
    /// A limit of this many requests per minute.
    pub(crate) fn new(per_minute: u32) -> Self {
        Self { per_minute: per_minute.into(), clients: Mutex::default() }
    }

    /// Counts a request.
    ///
    /// # Errors
    /// If the client has no requests left; the error says when to try again.
    pub(crate) fn count(&self, client: ClientId, now: Instant) -> Result<(), ApiError> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if clients.len() >= MAX_CLIENTS && !clients.contains_key(&client) {
            self.forget(&mut clients, now);
        }
        let fresh = Allowance { left: self.per_minute, at: now };
        let allowance = clients.entry(client).or_insert(fresh);
        allowance.left = self.refilled(allowance, now);
        allowance.at = now;
        if allowance.left < 1.0 {
            let wait = (1.0 - allowance.left) * 60.0 / self.per_minute;
            return Err(ApiError::too_often(Duration::from_secs_f64(wait)));
        }
        allowance.left -= 1.0;
        Ok(())
    }

    fn refilled(&self, allowance: &Allowance, now: Instant) -> f64 {
        let minutes = now.saturating_duration_since(allowance.at).as_secs_f64() / 60.0;
        (allowance.left + minutes * self.per_minute).min(self.per_minute)
    }

    /// Makes room: clients with a full allowance need not be kept. If no client has one, the half that has been idle longest is
    /// forgotten.
    fn forget(&self, clients: &mut HashMap<ClientId, Allowance>, now: Instant) {
        clients.retain(|_, allowance| self.refilled(allowance, now) < self.per_minute);
        if clients.len() >= MAX_CLIENTS {
            let mut times: Vec<Instant> = clients.values().map(|allowance| allowance.at).collect();
            let middle = times.len() / 2;
            let median = *times.select_nth_unstable(middle).1;
            clients.retain(|_, allowance| allowance.at > median);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderValue, StatusCode};
    use rstest::rstest;
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn shown(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(value).expect("a header"))])
    }

    #[rstest]
    #[case("Bearer first", Some(0))]
    #[case("bearer second", Some(1))]
    #[case("Bearer firs", None)]
    #[case("Bearer first2", None)]
    #[case("Basic first", None)]
    #[case("Bearer", None)]
    fn only_known_keys_are_accepted(#[case] header: &str, #[case] key: Option<usize>) {
        let keys = ApiKeys::new(["first", "second"]).expect("keys");
        assert_eq!(keys.identify(&shown(header), HERE).ok(), key.map(ClientId::Key));
    }

    #[test]
    fn without_keys_clients_are_identified_by_address() {
        let keys = ApiKeys::new([]).expect("no keys");
        assert_eq!(keys.identify(&HeaderMap::new(), HERE), Ok(ClientId::Address(HERE)));
    }

    #[rstest]
    #[case("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff", true)]
    #[case("2001:db8:1:2::1", "2001:db8:1:3::1", false)]
    #[case("192.0.2.1", "192.0.2.2", false)]
    #[case("::ffff:192.0.2.1", "192.0.2.1", true)]
    #[case("::ffff:192.0.2.1", "::ffff:192.0.2.2", false)]
    fn addresses_of_one_network_are_one_client(
        #[case] one: IpAddr,
        #[case] other: IpAddr,
        #[case] same: bool,
    ) {
        assert_eq!(ClientId::at(one) == ClientId::at(other), same);
    }

    #[test]
    fn keys_are_read_from_a_file_and_a_list_and_empty_sources_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        std::fs::write(&path, "# ours\n\n one \ntwo\n").expect("it is written");
        let keys =
            ApiKeys::load(Some(&path), Some("three, four"), &["five".to_owned()]).expect("there are keys");
        assert_eq!(keys.keys.len(), 5);
        assert!(keys.identify(&shown("Bearer five"), HERE).is_ok());
        assert!(keys.identify(&shown("Bearer one"), HERE).is_ok());
        std::fs::write(&path, "# none\n").expect("it is written");
        assert!(ApiKeys::load(Some(&path), None, &[]).is_err());
        assert!(ApiKeys::load(None, Some(""), &[]).is_err());
    }

    #[rstest]
    #[case(&["a speed"], "`speed`")]
    #[case(&["a", "b priority metrics"], "reads the metrics only")]
    #[case(&["a metrics"], "add a key without it")]
    fn rights_that_make_no_sense_are_refused(#[case] keys: &[&str], #[case] reason: &str) {
        let error = ApiKeys::new(keys.iter().copied()).expect_err("it is refused").to_string();
        assert!(error.contains(reason), "{error}");
    }

    #[test]
    fn a_burst_is_accepted_and_then_one_request_at_a_time() {
        let limit = RateLimit::new(3);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!((0..3).all(|_| limit.count(ClientId::Key(0), at(0)).is_ok()));
        let refused = limit.count(ClientId::Key(0), at(1)).expect_err("the burst is over");
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(limit.count(ClientId::Key(1), at(1)).is_ok(), "another client has its own allowance");
        assert!(limit.count(ClientId::Key(0), at(21)).is_ok());
        assert!(limit.count(ClientId::Key(0), at(21)).is_err());
    }

    #[test]
    fn memory_is_bounded_for_any_number_of_addresses() {
        let limit = RateLimit::new(1);
        let now = Instant::now();
        for address in 0..2 * MAX_CLIENTS as u32 {
            let client = ClientId::Address(Ipv4Addr::from_bits(address).into());
            assert!(limit.count(client, now + Duration::from_micros(address.into())).is_ok());
        }
        assert!(limit.clients.lock().expect("not poisoned").len() <= MAX_CLIENTS);
    }
}

//! A hub of our own on a local port: what the tests of `fetch` talk to.
//!
//! Every connection gets a thread, a time limit and one answer. [`Repository`] knows the protocol; tests
//! change single answers by wrapping its handler.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

const LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// With the query.
    pub(crate) path: String,
    /// Names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
}

impl Request {
    /// First byte of a range request.
    pub(crate) fn range_start(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.split('-').next()?.parse().ok()
    }
}

/// Stands among the requests for a client that had not hung up on a silent server when the server's own limit was reached.
pub(crate) const WAITED: &str = "the client did not give up";

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Close after this many bytes of the body, though more were announced.
    pub(crate) cut_after: Option<usize>,
    /// Keep the connection open in silence until the client hangs up, or note that it did not: [`WAITED`].
    pub(crate) falls_silent: bool,
    /// Announce the length of the body.
    pub(crate) announce: bool,
}

impl Answer {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            cut_after: None,
            falls_silent: false,
            announce: true,
        }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn cut_after(mut self, bytes: usize) -> Self {
        self.cut_after = Some(bytes);
        self
    }
}

pub(crate) type Handler = Arc<dyn Fn(&Request) -> Answer + Send + Sync>;

/// A server that stops when dropped.
pub(crate) struct MockServer {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    stopping: Arc<AtomicBool>,
    accepting: Option<thread::JoinHandle<()>>,
}

impl MockServer {
    pub(crate) fn start(handler: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let handler: Handler = Arc::new(handler);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stopping = Arc::new(AtomicBool::new(false));
        let accepting = thread::spawn({
            let (requests, stopping) = (requests.clone(), stopping.clone());
            move || {
                for stream in listener.incoming() {
                    if stopping.load(Ordering::SeqCst) {
                        break;
                    }
                    let (handler, requests) = (handler.clone(), requests.clone());
                    // A client that hangs up early is part of some tests.
                    thread::spawn(move || stream.and_then(|stream| serve(stream, &handler, &requests)));
                }
            }
        });
        Self { address, requests, stopping, accepting: Some(accepting) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// How many requests had `part` in their path.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.requests().iter().filter(|request| request.path.contains(part)).count()
    }
}

impl Drop for MockServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the loop that waits for a connection.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            accepting.join().unwrap();
        }
    }
}

fn serve(stream: TcpStream, handler: &Handler, requests: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut lines = BufReader::new((&stream).take(64 * 1024)).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(()) };
    assert!(first.starts_with("GET "), "only GET is used: {first}");
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        match line.split_once(':') {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.trim().to_owned()),
            None => break,
        };
    }
    let request = Request { path, headers };
    requests.lock().unwrap().push(request.clone());
    let answer = handler(&request);
    let mut head = format!("HTTP/1.1 {} Mock\r\nConnection: close\r\n", answer.status);
    if answer.announce {
        head.push_str(&format!("Content-Length: {}\r\n", answer.body.len()));
    }
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let body = &answer.body[..answer.cut_after.unwrap_or(answer.body.len())];
    (&stream).write_all(head.as_bytes())?;
    (&stream).write_all(b"\r\n")?;
    (&stream).write_all(body)?;
    if answer.falls_silent && (&stream).read_to_end(&mut Vec::new()).is_err() {
        requests.lock().unwrap().push(Request { path: WAITED.to_owned(), headers: BTreeMap::new() });
    }
    Ok(())
}

/// A repository as the hub serves it: a list of files, small ones sent by the hub itself, large ones
/// (`.safetensors`, `.gguf`) by a redirect to `content`.
#[derive(Debug, Clone)]
pub(crate) struct Repository {
    pub(crate) id: String,
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Start of the address to which large files are redirected; `/cdn` for the same server, `http://..` for
    /// another.
    pub(crate) content: String,
}

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl Repository {
    pub(crate) fn new(id: &str, files: &[(&str, &[u8])]) -> Self {
        Self {
            id: id.to_owned(),
            commit: COMMIT.to_owned(),
            files: files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect(),
            content: "/cdn".to_owned(),
        }
    }

    /// A small model: configuration, tokenizer, weights of some hundred kilobytes, and files nobody wants.
    pub(crate) fn model(id: &str) -> Self {
        Self::new(
            id,
            &[
                ("README.md", b"hello"),
                ("config.json", b"{\"model_type\": \"llama\"}"),
                ("generation_config.json", b"{}"),
                ("model.safetensors", &weights(600_000)),
                ("pytorch_model.bin", b"pickle"),
                ("tokenizer.json", b"{\"version\": \"1.0\"}"),
            ],
        )
    }

    pub(crate) fn answer(&self, request: &Request) -> Answer {
        let path = request.path.split('?').next().unwrap_or_default();
        if path.starts_with(&format!("/api/models/{}/revision/", self.id)) {
            return Answer::new(200, self.listing());
        }
        if let Some(file) = path.strip_prefix("/cdn/") {
            return self.content_answer(file, request);
        }
        let resolve = format!("/{}/resolve/{}/", self.id, self.commit);
        let Some((file, content)) =
            path.strip_prefix(&resolve).and_then(|file| self.files.get_key_value(file))
        else {
            return Answer::new(404, "Entry not found");
        };
        let answer = if is_large(file) {
            Answer::new(302, "Found")
                .header("Location", format!("{}/{file}", self.content))
                .header("X-Linked-Size", content.len().to_string())
                .header("X-Linked-Etag", format!("\"{}\"", sha256(content)))
        } else {
            Answer::new(200, content.clone())
        };
        answer.header("X-Repo-Commit", &self.commit).header("ETag", "\"0123456789\"")
    }

    pub(crate) fn content_answer(&self, file: &str, request: &Request) -> Answer {
        let Some(content) = self.files.get(file) else { return Answer::new(404, "no such key") };
        match request.range_start() {
            Some(start) if start < content.len() => Answer::new(206, &content[start..])
                .header("Content-Range", format!("bytes {start}-{}/{}", content.len() - 1, content.len())),
            Some(_) => Answer::new(416, ""),
            None => Answer::new(200, content.clone()),
        }
    }

    fn listing(&self) -> String {
        let files: Vec<_> = self
            .files
            .iter()
            .map(|(name, content)| match is_large(name) {
                true => serde_json::json!({"rfilename": name, "size": content.len(), "blobId": "x",
                                           "lfs": {"sha256": sha256(content), "size": content.len(), "pointerSize": 1}}),
                false => serde_json::json!({"rfilename": name, "size": content.len(), "blobId": "x"}),
            })
            .collect();
        serde_json::json!({"id": self.id, "sha": self.commit, "private": false, "siblings": files})
            .to_string()
    }
}

fn is_large(file: &str) -> bool {
    file.ends_with(".safetensors") || file.ends_with(".gguf")
}

pub(crate) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes without pattern, the same each time: a piece put in the wrong place shows, and nothing compresses
/// them.
pub(crate) fn weights(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(step).collect()
}

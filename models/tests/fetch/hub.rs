//! The hub, as a mock server plays it: well-behaved, forbidding, broken and hostile.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dsrun_models::fetch::{FetchOptions, Silent, Source, Token, WeightFiles, list_cached, remove, resolve};
use rstest::rstest;

use crate::common::{Recorder, assert_says, files_under, options};
use crate::mock_hub::{Answer, COMMIT, MockServer, Repository, Request, WAITED, weights};

const ID: &str = "ann/tiny";
const MODEL_FILES: [&str; 5] =
    ["config.json", "generation_config.json", "manifest.json", "model.safetensors", "tokenizer.json"];

struct Setting {
    cache: tempfile::TempDir,
    hub: MockServer,
    options: FetchOptions,
}

impl Setting {
    fn new(handler: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let cache = tempfile::tempdir().unwrap();
        let hub = MockServer::start(handler);
        let mut options = options(cache.path());
        options.hub_endpoint = hub.url();
        Self { cache, hub, options }
    }

    fn serving(repository: Repository) -> Self {
        Self::new(move |request| repository.answer(request))
    }

    fn entry(&self, folder: &str) -> std::path::PathBuf {
        self.cache.path().join("models").join(folder)
    }

    /// Nothing of a model may be left behind.
    #[track_caller]
    fn assert_clean(&self) {
        assert_eq!(files_under(self.cache.path()), Vec::<String>::new());
        assert_eq!(list_cached(&self.options).unwrap(), []);
    }
}

/// A handler that serves the model but lets `change` alter the answers for its weights.
fn with_weights(change: impl Fn(&Request, Answer) -> Answer + Send + Sync + 'static) -> Setting {
    let repository = Repository::model(ID);
    Setting::new(move |request| {
        let answer = repository.answer(request);
        if request.path.contains("/cdn/model.safetensors") { change(request, answer) } else { answer }
    })
}

#[test]
fn a_model_is_fetched_once_listed_and_removed() {
    let repository = Repository::model(ID);
    let setting = Setting::serving(repository.clone());
    let mut progress = Recorder::default();
    let model = resolve(ID, &setting.options, &mut progress).unwrap();

    let entry = setting.entry("ann--tiny");
    assert_eq!((model.source, &model.directory), (Source::Hub, &entry));
    assert_eq!(model.weights, WeightFiles::Safetensors(vec![entry.join("model.safetensors")]));
    assert_eq!(model.tokenizer, Some(entry.join("tokenizer.json")));
    assert_eq!(model.chat_template, None);
    assert_eq!(files_under(&entry), MODEL_FILES);
    for file in ["config.json", "model.safetensors"] {
        assert_eq!(fs::read(entry.join(file)).unwrap(), repository.files[file]);
    }
    let step = progress.step("model.safetensors");
    assert_eq!((step.total, step.last), (Some(600_000), 600_000));

    let requests = setting.hub.requests().len();
    let again = resolve(ID, &setting.options, &mut Silent).unwrap();
    assert_eq!((again.source, again.weights), (Source::Cache, model.weights));
    assert_eq!(setting.hub.requests().len(), requests, "a cached model asks nobody");

    let listed = list_cached(&setting.options).unwrap();
    let [cached] = listed.as_slice() else { panic!("{listed:?}") };
    assert_eq!((cached.name.as_str(), cached.complete, &cached.path), (ID, true, &entry));
    assert_eq!(
        cached.files,
        MODEL_FILES.iter().filter(|file| **file != "manifest.json").copied().collect::<Vec<_>>()
    );
    assert!(cached.bytes > 600_000 && cached.source.contains(COMMIT), "{cached:?}");
    remove(ID, &setting.options, &mut Silent).unwrap();
    setting.assert_clean();
    assert_says(remove(ID, &setting.options, &mut Silent), &["not in the cache"]);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let mut repository = Repository::model(ID);
    let elsewhere = MockServer::start({
        let repository = repository.clone();
        move |request| repository.content_answer(request.path.trim_start_matches('/'), request)
    });
    repository.content = elsewhere.url();
    let mut setting = Setting::serving(repository);
    setting.options.hub_token = Some(Token::new("hf_secret").unwrap());
    resolve(ID, &setting.options, &mut Silent).unwrap();

    assert!(setting.hub.requests().len() >= 5);
    for request in setting.hub.requests() {
        assert_eq!(request.headers["authorization"], "Bearer hf_secret", "{}", request.path);
    }
    assert_eq!(elsewhere.requests().len(), 1);
    assert!(!elsewhere.requests()[0].headers.contains_key("authorization"));
    assert!(!format!("{:?}", setting.options).contains("hf_secret"));
    for file in files_under(setting.cache.path()) {
        let content = fs::read(setting.cache.path().join(file)).unwrap();
        assert!(!String::from_utf8_lossy(&content).contains("hf_secret"));
    }
}

#[test]
fn shards_are_those_the_index_names() {
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let setting = Setting::serving(Repository::new(
        ID,
        &[
            ("config.json", b"{}"),
            ("model.safetensors.index.json", index),
            ("model-00001-of-00002.safetensors", &weights(1000)),
            ("model-00002-of-00002.safetensors", &weights(2000)),
            ("consolidated.safetensors", &weights(3000)),
        ],
    ));
    let model = resolve(ID, &setting.options, &mut Silent).unwrap();
    let entry = setting.entry("ann--tiny");
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(
        model.weights,
        WeightFiles::Safetensors(shards.iter().map(|shard| entry.join(shard)).collect())
    );
    assert!(!entry.join("consolidated.safetensors").exists());
}

#[test]
fn a_revision_is_encoded_in_addresses_and_cached_by_itself() {
    let setting = Setting::serving(Repository::model(ID));
    let model = resolve("ann/tiny@refs/pr/7", &setting.options, &mut Silent).unwrap();
    assert_eq!(model.directory, setting.entry("ann--tiny@refs+pr+7"));
    assert_eq!(setting.hub.count("/revision/refs%2Fpr%2F7?blobs=true"), 1);
    assert_eq!(list_cached(&setting.options).unwrap()[0].name, "ann/tiny@refs/pr/7");
}

#[test]
fn a_gguf_file_is_taken_by_the_type_of_its_weights() {
    let setting = Setting::serving(Repository::new(
        ID,
        &[
            ("m-Q4_K_M.gguf", weights(5000).as_slice()),
            ("m-Q8_0-00001-of-00002.gguf", weights(400).as_slice()),
            ("m-Q8_0-00002-of-00002.gguf", weights(300).as_slice()),
            ("mmproj-m-Q8_0.gguf", weights(200).as_slice()),
        ],
    ));
    let model = resolve("ann/tiny:q4_k_m", &setting.options, &mut Silent).unwrap();
    let entry = setting.entry("ann--tiny=q4_k_m");
    assert_eq!(model.weights, WeightFiles::Gguf(vec![entry.join("m-Q4_K_M.gguf")]));

    let model = resolve("ann/tiny:Q8_0", &setting.options, &mut Silent).unwrap();
    let entry = setting.entry("ann--tiny=Q8_0");
    let parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"].map(|part| entry.join(part));
    assert_eq!(model.weights, WeightFiles::Gguf(parts.to_vec()));
    let again = resolve("ann/tiny:Q8_0", &setting.options, &mut Silent).unwrap();
    assert_eq!((again.source, again.weights), (Source::Cache, model.weights));

    assert_says(
        resolve("ann/tiny:Q2_K", &setting.options, &mut Silent),
        &["no .gguf file", "type Q2_K", "m-Q4_K_M.gguf"],
    );
}

#[test]
fn one_gguf_file_of_many_is_taken_by_name() {
    let setting = Setting::serving(Repository::new(
        ID,
        &[("q4/m.Q4_1.gguf", &weights(5000)), ("m.Q8_0.gguf", &weights(9000)), ("config.json", b"{}")],
    ));
    let model = resolve("ann/tiny:q4/m.Q4_1.gguf", &setting.options, &mut Silent).unwrap();
    let entry = setting.entry("ann--tiny=q4+m.Q4_1.gguf");
    assert_eq!(model.weights, WeightFiles::Gguf(vec![entry.join("m.Q4_1.gguf")]));
    assert_eq!(files_under(&entry), ["m.Q4_1.gguf", "manifest.json"]);
    assert_says(resolve("ann/tiny:x.gguf", &setting.options, &mut Silent), &["x.gguf", "m.Q8_0.gguf"]);
    assert_says(resolve(ID, &setting.options, &mut Silent), &["ann/tiny:FILE", "q4/m.Q4_1.gguf"]);
}

#[rstest]
#[case(401, None, "no HF_TOKEN was sent")]
#[case(403, None, "accept its terms at http://127.0.0.1")]
#[case(403, Some("hf_secret"), "HF_TOKEN was sent and is not allowed")]
fn refused_access_speaks_of_the_token(#[case] status: u16, #[case] token: Option<&str>, #[case] part: &str) {
    let mut setting = Setting::new(move |_| Answer::new(status, "gated"));
    setting.options.hub_token = token.map(|token| Token::new(token).unwrap());
    let message = assert_says(
        resolve(ID, &setting.options, &mut Silent),
        &[part, &status.to_string(), "HF_TOKEN", "hint: check the spelling", ID],
    );
    assert!(!message.contains("hf_secret"));
    assert_eq!(setting.hub.requests().len(), 1, "a refusal is not retried");
    setting.assert_clean();
}

#[test]
fn a_refusal_from_elsewhere_is_not_about_the_token() {
    let elsewhere = MockServer::start(|_| Answer::new(403, "the signed address has expired"));
    let mut repository = Repository::model(ID);
    repository.content = elsewhere.url();
    let setting = Setting::serving(repository);
    let message = assert_says(resolve(ID, &setting.options, &mut Silent), &["HTTP 403", &elsewhere.url()]);
    assert!(!message.contains("HF_TOKEN"), "{message}");
}

#[test]
fn an_unknown_model_is_said_to_be_not_found() {
    let setting = Setting::new(|_| Answer::new(404, "Repository not found"));
    assert_says(
        resolve(ID, &setting.options, &mut Silent),
        &["404 (not found)", "check the name", "1. path ann/tiny"],
    );
    setting.assert_clean();
}

#[test]
fn without_network_everything_tried_is_listed() {
    let cache = tempfile::tempdir().unwrap();
    // The port was free a moment ago, and refuses now.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut options = options(cache.path());
    options.hub_endpoint = format!("http://{address}");
    options.hub_cache = Some(cache.path().join("hf"));
    let message = assert_says(
        resolve(ID, &options, &mut Silent),
        &[
            "1. path ann/tiny",
            "2. cache ",
            "3. Hugging Face cache ",
            "4. hub http://127.0.0.1",
            "hint: check the network",
        ],
    );
    assert!(message.to_lowercase().contains("refused"), "{message}");
    assert_eq!(files_under(cache.path()), Vec::<String>::new());
}

#[test]
fn a_broken_transfer_is_gone_on_with() {
    let setting = with_weights(|request, answer| {
        // Each connection brings 250 000 bytes, which is less than a third of what is left at first.
        let whole = request.range_start().unwrap_or(0) + 250_000 >= 600_000;
        if whole { answer } else { answer.cut_after(250_000) }
    });
    resolve(ID, &setting.options, &mut Silent).unwrap();
    let starts: Vec<_> = setting
        .hub
        .requests()
        .iter()
        .filter(|r| r.path.contains("/cdn/"))
        .map(Request::range_start)
        .collect();
    assert_eq!(starts[0], None);
    assert!(
        starts.len() >= 3 && starts[1..].iter().all(|start| start.is_some_and(|start| start > 0)),
        "{starts:?}"
    );
    let file = setting.entry("ann--tiny").join("model.safetensors");
    assert_eq!(fs::read(file).unwrap(), weights(600_000));
}

#[test]
fn a_server_without_ranges_is_asked_from_the_start() {
    let cuts = AtomicUsize::new(0);
    let setting = with_weights(move |_, _| {
        let whole = Answer::new(200, weights(600_000));
        if cuts.fetch_add(1, Ordering::SeqCst) == 0 { whole.cut_after(400_000) } else { whole }
    });
    resolve(ID, &setting.options, &mut Silent).unwrap();
    assert_eq!(fs::read(setting.entry("ann--tiny").join("model.safetensors")).unwrap(), weights(600_000));
}

/// What is wrong with the weights' answers, and what the message says of it.
#[rstest]
#[case::always_cut(Answer::new(200, weights(600_000)).cut_after(100_000), "after 100000 of 600000 bytes")]
#[case::short(Answer::new(200, weights(1000)), "after 1000 of 600000 bytes")]
#[case::long(Answer::new(200, weights(600_001)), "more than the 600000 bytes")]
#[case::other_content(Answer::new(200, vec![7; 600_000]), "sha256 is")]
#[case::server_error(Answer::new(503, "busy"), "HTTP 503")]
#[case::missing_content(Answer::new(404, "gone"), "HTTP 404")]
#[case::expired_signature(Answer::new(403, "expired"), "HTTP 403")]
#[case::part_without_range(Answer::new(206, weights(10)), "Content-Range")]
#[case::wrong_part(Answer::new(206, weights(10)).header("Content-Range", "bytes 5-14/600000"), "another part")]
#[case::redirect_nowhere(Answer::new(302, ""), "redirect without a usable target")]
#[case::redirect_to_a_file(Answer::new(302, "").header("Location", "file:///etc/passwd"), "redirect without")]
#[case::redirect_loop(Answer::new(302, "").header("Location", "/cdn/model.safetensors"), "too many redirects")]
fn bad_weights_are_never_taken_for_whole(#[case] answer: Answer, #[case] part: &str) {
    let setting = with_weights(move |_, _| answer.clone());
    let mut progress = Recorder::default();
    assert_says(resolve(ID, &setting.options, &mut progress), &[part, "hint: "]);
    assert!(progress.step("model.safetensors").ended);
    // The small files came whole and are kept for the next try; of the weights there is nothing.
    let kept = files_under(&setting.entry("ann--tiny"));
    assert_eq!(kept, ["config.json", "generation_config.json", "manifest.json", "tokenizer.json"]);
    let mut offline = setting.options.clone();
    offline.offline = true;
    assert_says(resolve(ID, &offline, &mut Silent), &["an earlier fetch did not finish", "offline"]);
    assert!(!list_cached(&setting.options).unwrap()[0].complete);
}

#[test]
fn the_next_fetch_keeps_what_came_whole() {
    let broken = Arc::new(AtomicUsize::new(1));
    let setting = with_weights({
        let broken = broken.clone();
        move |_, answer| {
            if broken.load(Ordering::SeqCst) == 1 { Answer::new(200, vec![7; 600_000]) } else { answer }
        }
    });
    resolve(ID, &setting.options, &mut Silent).unwrap_err();
    broken.store(0, Ordering::SeqCst);
    resolve(ID, &setting.options, &mut Silent).unwrap();
    assert_eq!(setting.hub.count("/config.json"), 1);
    assert_eq!(files_under(&setting.entry("ann--tiny")), MODEL_FILES);
}

#[test]
fn an_unfinished_fetch_of_another_commit_is_not_mixed_in() {
    let moved = Arc::new(AtomicUsize::new(0));
    let setting = Setting::new({
        let moved = moved.clone();
        move |request| {
            let mut repository = Repository::model(ID);
            if moved.load(Ordering::SeqCst) == 1 {
                repository.commit = COMMIT.replace('0', "f");
                repository.files.insert("config.json".into(), b"{\"new\": true}".to_vec());
                repository.files.remove("generation_config.json");
            } else if request.path.contains("/cdn/") {
                return Answer::new(404, "gone");
            }
            repository.answer(request)
        }
    });
    resolve(ID, &setting.options, &mut Silent).unwrap_err();
    moved.store(1, Ordering::SeqCst);
    let model = resolve(ID, &setting.options, &mut Silent).unwrap();
    assert_eq!(fs::read(model.config.unwrap()).unwrap(), b"{\"new\": true}");
    assert_eq!(model.generation_config, None);
}

#[test]
fn a_silent_server_is_given_up() {
    let mut setting = with_weights(|_, answer| Answer { falls_silent: true, ..answer.cut_after(1000) });
    setting.options.stall_timeout = Duration::from_millis(200);
    setting.options.retries = 0;
    assert_says(resolve(ID, &setting.options, &mut Silent), &["after 1000 of 600000 bytes"]);
    assert_eq!(setting.hub.count(WAITED), 0);
}

#[test]
fn a_busy_hub_is_asked_again() {
    let asked = AtomicUsize::new(0);
    let repository = Repository::model(ID);
    let setting = Setting::new(move |request| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Answer::new(429, "slow down"),
        1 => Answer::new(502, "bad gateway"),
        _ => repository.answer(request),
    });
    resolve(ID, &setting.options, &mut Silent).unwrap();
}

/// Lists of files that no honest hub sends.
#[rstest]
#[case::no_json("<html>", "cannot be read")]
#[case::no_commit(r#"{"sha": "../../x", "siblings": []}"#, "names no commit")]
#[case::no_weights(
    r#"{"sha": "0123456789", "siblings": [{"rfilename": "pytorch_model.bin"}]}"#,
    "reads no other format"
)]
#[case::no_config(
    r#"{"sha": "0123456789", "siblings": [{"rfilename": "model.safetensors"}]}"#,
    "no config.json"
)]
#[case::deep("[[[[[[[[", "cannot be read")]
#[case::size(r#"{"sha": "0123456789", "siblings": [{"rfilename": "x", "size": -1}]}"#, "cannot be read")]
fn bad_listings_are_refused(#[case] listing: &'static str, #[case] part: &str) {
    let setting = Setting::new(move |_| Answer::new(200, listing));
    assert_says(resolve(ID, &setting.options, &mut Silent), &[part]);
    setting.assert_clean();
}

#[rstest]
#[case(r#"{"weight_map": {"a": "../../../evil.safetensors"}}"#, "starts with")]
#[case(r#"{"weight_map": {"a": "absent.safetensors"}}"#, "which the repository lacks")]
fn an_index_cannot_lead_astray(#[case] index: &str, #[case] part: &str) {
    let files: [(&str, &[u8]); 2] =
        [("config.json", b"{}"), ("model.safetensors.index.json", index.as_bytes())];
    let setting = Setting::serving(Repository::new(ID, &files));
    assert_says(resolve(ID, &setting.options, &mut Silent), &[part]);
}

#[test]
fn a_size_that_nobody_names_is_refused() {
    let listing = r#"{"sha": "0123456789", "siblings": [{"rfilename": "model.safetensors"}, {"rfilename": "config.json"}]}"#;
    let setting = Setting::new(move |request| match request.path.starts_with("/api/") {
        true => Answer::new(200, listing),
        false => Answer { announce: false, ..Answer::new(200, "{}") },
    });
    assert_says(resolve(ID, &setting.options, &mut Silent), &["did not say how long"]);
    setting.assert_clean();
}

#[test]
fn a_file_of_another_commit_is_refused() {
    let repository = Repository::model(ID);
    let setting = Setting::new(move |request| {
        let mut answer = repository.answer(request);
        answer.headers.retain(|(name, _)| name != "X-Repo-Commit");
        answer.header("X-Repo-Commit", "ffffffffff")
    });
    assert_says(resolve(ID, &setting.options, &mut Silent), &["sent commit `ffffffffff` instead of"]);
    setting.assert_clean();
}

/// A snapshot as the Python library lays it out, with links to blobs where the system has them.
fn python_cache(folder: &Path, revision: &str) {
    let model = folder.join("models--ann--tiny");
    let snapshot = model.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(model.join("blobs")).unwrap();
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs").join(revision), COMMIT).unwrap();
    for (name, content) in &Repository::model(ID).files {
        #[cfg(unix)]
        {
            fs::write(model.join("blobs").join(name), content).unwrap();
            std::os::unix::fs::symlink(Path::new("../../blobs").join(name), snapshot.join(name)).unwrap();
        }
        #[cfg(not(unix))]
        fs::write(snapshot.join(name), content).unwrap();
    }
}

#[rstest]
#[case("ann/tiny", true)]
#[case("ann/tiny@0123456789abcdef0123456789abcdef01234567", true)]
#[case("ann/tiny@v2", false)]
#[case("ann/other", false)]
fn the_python_cache_serves_offline(#[case] name: &str, #[case] found: bool) {
    let folder = tempfile::tempdir().unwrap();
    python_cache(folder.path(), "main");
    let mut setting = Setting::serving(Repository::model(ID));
    setting.options.hub_cache = Some(folder.path().to_owned());
    setting.options.offline = true;
    let outcome = resolve(name, &setting.options, &mut Silent);
    if found {
        assert_eq!(outcome.unwrap().source, Source::HubCache);
    } else {
        assert_says(outcome, &["not there", "offline", "hint: allow the network once"]);
    }
    assert_eq!(setting.hub.requests().len(), 0, "offline opens no connection");
    assert!(!setting.cache.path().join("models").exists(), "nothing is written");
}

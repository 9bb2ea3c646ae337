//! Certificates and tokens, with real processes. A client without keys is refused with a clear
//! message and one line in the log, and jobs are not disturbed. Keys do not change the bits, and
//! are replaced while a job runs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::harness::keys::{Fortress, environment, make};
use crate::harness::{self, Lacks, Process, ebb, events, model, root, text};
use net::channel::{Channel, Dialer, Purpose};
use proto::artifact::describe;
use proto::pb;
use proto::pb::jobs_client::JobsClient;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Number of silent connections.
const CROWD: u64 = 10_000;

/// Deadline of every wait for a state that must come.
const PATIENCE: Duration = Duration::from_secs(120);

const SETS: [&str; 2] = ["--set", "epochs=20"];

fn job() -> PathBuf {
    root().join("examples/digits/job.toml")
}

/// Returns the model of an undisturbed job without any keys.
fn undisturbed() -> Vec<u8> {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let run = ebb(["run", "--workers", "1", "--ps", "1", "--out"]).arg(&out).args(SETS).arg(job()).output();
    let run = run.unwrap();
    assert!(run.status.success(), "{}", text(&run));
    model(&out)
}

fn submission(fortress: &Fortress, out: &Path) -> Command {
    let mut command = fortress.ebb("anna", ["submit", "--follow", "--out", out.to_str().unwrap()]);
    command.args(SETS).arg(job()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs jobs one after the other until `attack` is over. Each must end with the bits of an
/// undisturbed one.
fn while_jobs_run<T>(fortress: &Fortress, attack: impl FnOnce() -> T) -> T {
    let expected = undisturbed();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let jobs = scope.spawn(|| {
            let mut count = 0;
            while count == 0 || !over.load(Ordering::Relaxed) {
                let out = fortress.dir.path().join(format!("out-{count}"));
                let output = submission(fortress, &out).output().unwrap();
                assert!(output.status.success(), "{}", text(&output));
                assert!(model(&out) == expected, "other bits than an undisturbed run");
                count += 1;
            }
            count
        });
        // The jobs end even if the attack panics, and the test with them.
        let running = Over(&over);
        // The first job is under way.
        let metrics = fortress.dir.path().join("out-0/metrics.jsonl");
        until("the job trains", || jobs.is_finished() || metrics.exists());
        let result = attack();
        drop(running);
        assert!(jobs.join().unwrap() > 0);
        result
    })
}

/// Sets the flag when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[expect(clippy::disallowed_methods, reason = "a state of another process is waited for, and not for ever")]
fn until(what: &str, mut state: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !state() {
        assert!(begin.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// Time after which a server logs the same refusal again, less some seconds for the difference
/// between two clocks and for a server that stands still before it logs.
const AGAIN: Duration = Duration::from_secs(60 - 10);

/// Returns the log lines about refusals, each kind once. Lines of one kind are a minute apart.
fn refusals(process: &Process) -> Vec<String> {
    let mut last = BTreeMap::new();
    let mut firsts = Vec::new();
    for line in process.log().lines() {
        let Some((head, refusal)) = line.split_once("refused: ") else { continue };
        let kind = refusal.split(" details=").next().unwrap_or_default().to_owned();
        let at = humantime::parse_rfc3339(head.split_whitespace().next().unwrap()).unwrap();
        match last.insert(kind, at) {
            None => firsts.push(line.to_owned()),
            Some(before) => {
                let apart = at.duration_since(before).unwrap();
                assert!(apart >= AGAIN, "logged again after {apart:?}: {line}");
            }
        }
    }
    firsts
}

/// An attempt that must be refused.
struct Attempt<'a> {
    what: &'a str,
    /// Makes the attempt, and returns the answer.
    tries: Box<dyn Fn() -> String + 'a>,
    /// Parts of the answer.
    told: &'a [&'a str],
    /// Parts of the one line in the server's log.
    logged: &'a [&'a str],
}

/// Runs a command that must fail, and returns its output.
fn failure(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success(), "expected an error, got:\n{}", text(&output));
    text(&output)
}

#[test]
fn who_may_not_is_refused_clearly_and_logged_once_while_jobs_give_the_same_bits() {
    let fortress = Fortress::start(2, 2);
    let certs = fortress.certs();
    let other = fortress.dir.path().join("other");
    make(&other);
    expired(&certs, &certs.join("late"));
    let with = |name: &str, flag: &str, value: &Path, args: &[&str]| {
        failure(fortress.ebb(name, args.iter().copied()).env(flag, value))
    };
    let jobs = ["jobs", "--master-timeout", "60s"];
    let plain = fortress.url.replace("https://", "http://");
    let spec = job();
    let submit = ["submit", spec.to_str().unwrap()];
    let attempt = |what, told, logged, tries| Attempt { what, told, logged, tries };
    let attempts = [
        attempt(
            "without a certificate",
            &["without a certificate", "--tls-cert"][..],
            &["no certificate"][..],
            Box::new(|| {
                let mut command = fortress.ebb("anna", jobs);
                failure(command.env_remove("EBB_TLS_CERT").env_remove("EBB_TLS_KEY"))
            }) as Box<dyn Fn() -> String>,
        ),
        attempt(
            "without TLS",
            &["wants TLS"],
            &["not encrypted"],
            Box::new(|| {
                let mut command = ebb(jobs);
                failure(command.env("EBB_MASTER", &plain).env("EBB_TOKEN_FILE", certs.join("anna.token")))
            }),
        ),
        attempt(
            "with a certificate of another authority",
            &["refused this process's certificate", "authority"],
            &["a certificate of another authority"],
            Box::new(|| {
                let mut command = fortress.ebb("anna", jobs);
                failure(command.envs(environment(&other, "anna")).env("EBB_TLS_CA", certs.join("ca.pem")))
            }),
        ),
        attempt(
            "trusting another authority",
            &["the server's certificate is not good", "--tls-ca"],
            &["the client does not trust this server"],
            Box::new(|| with("anna", "EBB_TLS_CA", &other.join("ca.pem"), &jobs)),
        ),
        attempt(
            "with an expired certificate",
            &["refused this process's certificate", "expired"],
            &["an expired certificate"],
            Box::new(|| {
                let mut command = fortress.ebb("anna", jobs);
                let file = |end| certs.join(format!("late.{end}"));
                failure(command.env("EBB_TLS_CERT", file("pem")).env("EBB_TLS_KEY", file("key")))
            }),
        ),
        attempt(
            "without a token",
            &["needs a token", "EBB_TOKEN_FILE"],
            &["no token", "Jobs/List"],
            Box::new(|| failure(fortress.ebb("anna", jobs).env_remove("EBB_TOKEN_FILE"))),
        ),
        attempt(
            "with a token of another cluster",
            &["does not know the token"],
            &["unknown token"],
            Box::new(|| with("anna", "EBB_TOKEN_FILE", &other.join("anna.token"), &jobs)),
        ),
        attempt(
            "submitting with a reader's token",
            &["role `read` may not `Jobs/Submit`", "submit or operate"],
            &["not for this role", "Jobs/Submit", "`eve`"],
            Box::new(|| failure(&mut fortress.ebb("eve", submit))),
        ),
        attempt(
            "submitting with a worker's token",
            &["role `worker` may not"],
            &["not for this role", "`worker`", "Jobs/List"],
            Box::new(|| with("anna", "EBB_TOKEN_FILE", &certs.join("worker.token"), &submit)),
        ),
        attempt(
            "submitting with a worker's token, past what the command asks first",
            &["role `worker` may not `Jobs/Submit`"],
            &["not for this role", "`worker`", "Jobs/Submit"],
            Box::new(|| {
                let part = pb::submit_request::Part::SpecJson("{}".to_owned());
                told(submit_parts(&fortress, "worker", vec![part]))
            }),
        ),
        attempt(
            "cancelling with a submitter's token",
            &["role `submit` may not `Jobs/Cancel`", "operate"],
            &["not for this role", "Jobs/Cancel", "`anna`"],
            // `ebb cancel` would first ask for the job, which may have ended by now.
            Box::new(|| {
                let request = pb::CancelRequest { job: "1".to_owned(), force: true };
                told(block_on(async { client(&fortress, "anna").cancel(request).await.map(drop) }))
            }),
        ),
        attempt(
            "joining as a ps with a worker's token",
            &["role `worker` may not join as a ps"],
            &["to join as another role"],
            Box::new(|| {
                let mut command = fortress.ebb("ps", ["ps", "--listen", "127.0.0.1:0", "--name", "thief"]);
                failure(command.env("EBB_TOKEN_FILE", certs.join("worker.token")))
            }),
        ),
        attempt(
            "a message that is too large",
            &["too large"],
            &["a message that is too large", "Jobs/Submit"],
            Box::new(|| {
                let part = pb::submit_request::Part::SpecJson(" ".repeat(5 << 20));
                told(submit_parts(&fortress, "anna", vec![part]))
            }),
        ),
        attempt(
            "an artifact whose name leaves its folder",
            &["plain file name"],
            &["a file of a submission", "anna"],
            Box::new(|| {
                let artifact =
                    pb::Artifact { name: "../../../../evil".to_owned(), ..describe("evil", b"evil") };
                told(submit_parts(&fortress, "anna", with_file(artifact, b"evil")))
            }),
        ),
    ];
    while_jobs_run(&fortress, || {
        for Attempt { what, tries, told, logged } in &attempts {
            let before = refusals(&fortress.master).len();
            let heard = tries();
            for part in *told {
                assert!(heard.contains(part), "{what}: `{part}` missing in what it was told:\n{heard}");
            }
            until(what, || refusals(&fortress.master).len() > before);
            let lines = refusals(&fortress.master).split_off(before);
            assert_eq!(lines.len(), 1, "{what}: logged {lines:#?}");
            for part in *logged {
                assert!(lines[0].contains(part), "{what}: `{part}` missing in the log:\n{}", lines[0]);
            }
            // A repetition gets the same answer and no further line.
            assert_eq!(tries().lines().last(), heard.lines().last(), "{what}: another answer");
        }
    });
    assert_eq!(refusals(&fortress.master).len(), attempts.len(), "{:#?}", refusals(&fortress.master));
    assert!(!fortress.dir.path().join("evil").exists() && !fortress.dir.path().join("data/evil").exists());
    for process in fortress.ps.iter().chain(&fortress.workers) {
        assert_eq!(refusals(process), [""; 0]);
    }
}

#[test]
fn within_a_host_tokens_are_asked_for_and_the_kernel_says_of_which_user_a_process_is() {
    let fortress = Fortress::nearby(2, 2);
    let certs = fortress.certs();
    let plain = fortress.url.replace("https://", "http://");
    let with = |token: &str, args: &[&str]| {
        let mut command = ebb(args.iter().copied());
        command.env("EBB_MASTER", &plain).env("EBB_TOKEN_FILE", certs.join(token));
        command
    };
    let spec = job();
    let submit = ["submit", spec.to_str().unwrap()];
    while_jobs_run(&fortress, || {
        // A certificate would say that a process belongs to the cluster. Here the kernel says that
        // it belongs to the user who owns the keys.
        let output = with("eve.token", &["jobs"]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let (mut over_tcp, mut without) = (with("eve.token", &["jobs"]), with("", &["jobs"]));
        over_tcp.env("EBB_SOCKETS", "tcp");
        without.env_remove("EBB_TOKEN_FILE");
        for (number, (mut command, part)) in [
            (over_tcp, "wants TLS"),
            (without, "needs a token"),
            (with("eve.token", &submit), "role `read` may not `Jobs/Submit`"),
            (with("worker.token", &submit), "role `worker` may not"),
        ]
        .into_iter()
        .enumerate()
        {
            let said = failure(&mut command);
            assert!(said.contains(part), "{part} missing in:\n{said}");
            // A server may log a refusal after its answer. The next one must not be logged before.
            until(part, || refusals(&fortress.master).len() > number);
        }
        other_user(Fortress::address(&fortress.url));
    });
    let logged = refusals(&fortress.master);
    let expected =
        ["not encrypted", "no token", "`eve` (read)", "`worker` (worker)", "a process of another user"];
    for (number, part) in expected.into_iter().enumerate().take(logged.len().max(4)) {
        assert!(logged[number].contains(part), "{part} missing in {logged:#?}");
        assert!(number == 0 || logged[number].contains("peer=unix-socket"), "{logged:#?}");
    }
}

/// Any process of this user may take the name of a server that has no Unix socket, or does not run.
#[test]
#[cfg(target_os = "linux")]
fn who_takes_the_name_of_a_servers_unix_socket_hears_neither_calls_nor_tokens() {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    // The servers have no Unix sockets, as docs/security.md recommends for shared networks.
    let fortress = Fortress::start(0, 0);
    let name = format!("ebbflow {}", Fortress::address(&fortress.url));
    let squatter = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let (tell, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in squatter.incoming() {
            let mut bytes = [0; 1024];
            let count = std::io::Read::read(&mut stream.unwrap(), &mut bytes).unwrap_or_default();
            let _ = tell.send(bytes[..count].to_vec());
        }
    });
    let output = fortress.ebb("otto", ["jobs"]).env("EBB_SOCKETS", "nearest").output().unwrap();
    assert!(output.status.success(), "it does not go on to the server: {}", text(&output));
    let heard = heard.recv().expect("the name is tried");
    assert!(!heard.starts_with(b"PRI * HTTP/2"), "a call without TLS: {}", String::from_utf8_lossy(&heard));
    assert_eq!(heard.first(), Some(&22), "something else than the begin of a TLS handshake: {heard:?}");
}

/// Connects to the Unix socket of a server as another user. The server closes it without an answer.
fn other_user(address: &str) {
    if !harness::machine::is_root() || harness::machine::find("python3").is_none() {
        let what = "another user needs root and python3; its Unix socket is not tried";
        return harness::skipped(Lacks::Machine, what);
    }
    let script = "import os, socket, sys\n\
        os.setgid(65534); os.setuid(65534)\n\
        stream = socket.socket(socket.AF_UNIX)\n\
        stream.settimeout(120)\n\
        stream.connect('\\0ebbflow ' + sys.argv[1])\n\
        try:\n\
        \x20   stream.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n')\n\
        \x20   sys.exit(len(stream.recv(64)))\n\
        # Closed before or after its first bytes.\n\
        except (BrokenPipeError, ConnectionResetError): pass\n";
    let output = Command::new("python3").args(["-c", script, address]).output().unwrap();
    assert!(output.status.success(), "a process of another user is let in: {}", text(&output));
}

#[test]
fn a_token_has_the_jobs_and_bytes_that_its_entry_says() {
    let fortress = Fortress::start(1, 0);
    let token = fortress.dir.path().join("small.token");
    let args = ["certs", "token", "--name", "small", "--role", "submit", "--jobs-max", "1"];
    let more = ["--artifact-bytes-max", "100", "--file", token.to_str().unwrap()];
    let entry = harness::succeed(args.into_iter().chain(more));
    fortress.swap(|dir| {
        let list = fs::read_to_string(dir.join("tokens.toml")).unwrap();
        fs::write(dir.join("tokens.toml"), format!("{list}\n{entry}")).unwrap();
        fs::copy(&token, dir.join("small.token")).unwrap();
        for end in ["pem", "key"] {
            fs::copy(dir.join(format!("anna.{end}")), dir.join(format!("small.{end}"))).unwrap();
        }
    });
    let large = vec![7; 101];
    let refused = told(submit_parts(&fortress, "small", with_file(describe("model.pt", &large), &large)));
    assert!(refused.contains("artifact_bytes_max") && refused.contains("takes 100"), "{refused}");
    let spec = job();
    let submit = ["submit", spec.to_str().unwrap()];
    let output = fortress.ebb("small", submit).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let refused = failure(&mut fortress.ebb("small", submit));
    assert!(refused.contains("jobs_max") && refused.contains("takes 1"), "{refused}");
    // Other users are not counted.
    let output = fortress.ebb("otto", submit).args(["--set", "name=\"other\""]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let cancelled = fortress.ebb("otto", ["cancel", "1", "--force"]).output().unwrap();
    assert!(cancelled.status.success(), "{}", text(&cancelled));
    let output = fortress.ebb("small", submit).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn keys_are_replaced_while_a_job_runs_and_the_bits_stay() {
    let fortress = Fortress::start(2, 2);
    let certs = fortress.certs();
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let new = fortress.dir.path().join("new.token");
    let next = fortress.dir.path().join("next");
    make(&next);
    while_jobs_run(&fortress, || {
        // A token: first the servers accept the new one too, then workers show it, then the old one
        // is removed.
        let args = ["certs", "token", "--name", "worker", "--role", "worker", "--file"];
        let entry = harness::succeed(args.into_iter().chain([new.to_str().unwrap()]));
        let list = read(&certs.join("tokens.toml"));
        let old = certs.join("worker.token").canonicalize().unwrap();
        fortress.swap(|dir| fs::write(dir.join("tokens.toml"), format!("{list}\n{entry}")).unwrap());
        fortress.swap(|dir| copy(&new, &dir.join("worker.token")));
        let others = list.split("\n\n").filter(|entry| !entry.contains("name = \"worker\""));
        let others = others.collect::<Vec<_>>().join("\n\n");
        fortress.swap(|dir| fs::write(dir.join("tokens.toml"), format!("{others}\n\n{entry}")).unwrap());
        let mut command = fortress.ebb("worker", ["worker", "--name", "old", "--device", "cpu"]);
        let refused = failure(command.env("EBB_TOKEN_FILE", old));
        assert!(refused.contains("does not know the token"), "{refused}");

        // All certificates, from another authority: first both are trusted, then the new ones are
        // shown, then only the new ones are trusted.
        let both = read(&certs.join("ca.pem")) + &read(&next.join("ca.pem"));
        let old = environment(&certs.canonicalize().unwrap(), "anna");
        fortress.swap(|dir| fs::write(dir.join("ca.pem"), &both).unwrap());
        fortress.swap(|dir| {
            for name in ["master", "ps", "worker", "anna"] {
                for file in ["key", "pem"].map(|end| format!("{name}.{end}")) {
                    fs::copy(next.join(&file), dir.join(&file)).unwrap();
                }
            }
        });
        for (url, name) in [(&fortress.url, "master.pem"), (&fortress.ps_urls[0], "ps.pem")] {
            let expected = CertificateDer::from_pem_file(next.join(name)).unwrap();
            assert_eq!(shown(&certs, url), expected.as_ref(), "{name}");
        }
        fortress.swap(|dir| copy(&next.join("ca.pem"), &dir.join("ca.pem")));
        let mut command = fortress.ebb("anna", ["jobs", "--master-timeout", "60s"]);
        let refused = failure(command.envs(old).env("EBB_TLS_CA", next.join("ca.pem")));
        assert!(refused.contains("refused this process's certificate"), "{refused}");
    });
}

fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap();
}

/// Returns the certificate that a server shows.
fn shown(certs: &Path, url: &str) -> Vec<u8> {
    let config = config(certs, "anna");
    block_on(async {
        let stream = connect(config, Fortress::address(url)).await;
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    })
}

#[test]
fn a_crowd_that_says_nothing_and_streams_that_hardly_move_hold_nobody_up() {
    let fortress = Fortress::start_with(&["--stream-silence", "10s"], 2, 2);
    let address = Fortress::address(&fortress.url).to_owned();
    let ps = Fortress::address(&fortress.ps_urls[0]).to_owned();
    let count = crowd_that_fits();
    while_jobs_run(&fortress, || {
        let mut crowd: Vec<TcpStream> = (0..count).map(|_| TcpStream::connect(&address).unwrap()).collect();
        let output = fortress.ebb("eve", ["jobs"]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));

        // A handshake at a ps, one byte at a time; a valid connection without a call; and a
        // submission that stops.
        let dripping = std::thread::spawn(move || drip(&ps));
        let silent = {
            let (config, address) = (config(&fortress.certs(), "anna"), address.clone());
            std::thread::spawn(move || block_on(say_nothing(config, &address)))
        };
        let stalled = told(stall(&fortress));
        assert!(stalled.contains("a stream must send something every 10s"), "{stalled}");
        dripping.join().unwrap();
        silent.join().unwrap();

        for stream in &mut crowd {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            assert!(is_closed(stream.read(&mut [0])), "a connection that says nothing is kept");
        }
    });
    let logged = refusals(&fortress.master);
    let times = |part: &str| logged.iter().filter(|line| line.contains(part)).count();
    for why in ["too many connections without a call", "no call in time", "a stream that is too slow"] {
        assert!(times(why) >= 1, "{why}: {logged:#?}");
    }
    assert!(logged.len() <= 8, "{logged:#?}");
    let logged = refusals(&fortress.ps[0]);
    assert!(logged.len() == 1 && logged[0].contains("no handshake in time"), "{logged:#?}");
}

#[test]
fn numbers_are_shown_to_who_asks_and_a_crowd_that_does_not_is_closed() {
    let mut cluster =
        harness::Cluster::with_environment(&harness::ebb_path(), 0, 0, &[("EBB_METRICS", "127.0.0.1:0")]);
    let url = cluster.master.metrics_url();
    let address = url.trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
    let asked = || {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let mut crowd: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(&address).unwrap()).collect();
    assert!(asked().contains("ebb_master_"));
    for stream in &mut crowd {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        assert!(is_closed(stream.read(&mut [0])), "a connection that says nothing is kept");
    }
    assert!(asked().contains("ebb_master_"));
    assert!((1..=3).contains(&refusals(&cluster.master).len()), "{:#?}", refusals(&cluster.master));
}

#[test]
fn a_server_without_locks_stays_on_its_own_machine() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("data");
    let args = ["master", "--listen", "0.0.0.0:0", "--data-dir", data.to_str().unwrap()];
    let said = failure(&mut ebb(args));
    for part in ["--listen 0.0.0.0", "certificates and a list of tokens", "ebb certs init", "--insecure"] {
        assert!(said.contains(part), "`{part}` missing in:\n{said}");
    }
    let said = failure(&mut ebb(["ps", "--listen", "0.0.0.0:0", "--advertise", "http://10.0.0.1:1"]));
    assert!(said.contains("--insecure"), "{said}");
    // Metrics, and a worker's health, are refused in the same way.
    for flag in ["--metrics", "--health-listen"] {
        let said = failure(&mut ebb(["worker", "--device", "cpu", flag, "0.0.0.0:0"]));
        assert!(
            said.contains(flag) && said.contains("no certificates") && said.contains("--insecure"),
            "{said}"
        );
    }
    // A token is not shown to another machine over a connection that others can read.
    let token = dir.path().join("token");
    fs::write(&token, "a-token-that-is-long-enough").unwrap();
    let said = failure(ebb(["jobs", "--master", "http://192.0.2.1:1"]).env("EBB_TOKEN_FILE", &token));
    assert!(said.contains("for everybody to read"), "{said}");
}

/// Makes a certificate of the cluster's authority that expired yesterday: `PATH.pem`, `PATH.key`.
fn expired(certs: &Path, path: &Path) {
    let ca = KeyPair::from_pem(&fs::read_to_string(certs.join("ca.key")).unwrap()).unwrap();
    let mut authority = CertificateParams::default();
    authority.distinguished_name = Default::default();
    authority.distinguished_name.push(DnType::CommonName, "ebbflow lab authority");
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "late");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let key = KeyPair::generate().unwrap();
    let signed = params.signed_by(&key, &Issuer::new(authority, ca)).unwrap();
    fs::write(path.with_extension("pem"), signed.pem()).unwrap();
    fs::write(path.with_extension("key"), key.serialize_pem()).unwrap();
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(future)
}

fn client(fortress: &Fortress, name: &str) -> JobsClient<Channel> {
    let dialer = Dialer::tcp().with(fortress.keys(name));
    JobsClient::new(dialer.channel(&fortress.url, Purpose::Control).unwrap())
}

/// Calls `Jobs/Submit` with exactly these parts. It tries again while the master cannot write its
/// journal, as `ebb submit` does: a disk may take seconds for the jobs that run.
fn submit_parts(
    fortress: &Fortress,
    name: &str,
    parts: Vec<pb::submit_request::Part>,
) -> Result<(), tonic::Status> {
    let requests = parts.into_iter().map(|part| pb::SubmitRequest { part: Some(part), ..Default::default() });
    let requests: Vec<_> = requests.collect();
    let submit = || {
        let requests = futures::stream::iter(requests.clone());
        block_on(async { client(fortress, name).submit(requests).await.map(drop) })
    };
    let waits = |answer: &Result<_, tonic::Status>| {
        answer
            .as_ref()
            .is_err_and(|status| status.message().contains("has not been able to write its journal"))
    };
    let mut answer = submit();
    until("the journal is written", || {
        let again = waits(&answer);
        if again {
            answer = submit();
        }
        !again
    });
    answer
}

/// Returns the message of a call that must fail.
fn told(answer: Result<(), tonic::Status>) -> String {
    answer.expect_err("it is refused").message().to_owned()
}

/// Returns a valid specification and a file.
fn with_file(artifact: pb::Artifact, content: &[u8]) -> Vec<pb::submit_request::Part> {
    let part = |part| pb::submit_request::Part::Artifact(pb::ArtifactPart { part: Some(part) });
    vec![
        pb::submit_request::Part::SpecJson(spec_json()),
        part(pb::artifact_part::Part::Header(artifact)),
        part(pb::artifact_part::Part::Content(content.to_vec().into())),
    ]
}

fn spec_json() -> String {
    let text = fs::read_to_string(job()).unwrap();
    proto::spec::parse(&text, &job(), &[]).unwrap().to_json()
}

/// Begins a submission and sends nothing more.
fn stall(fortress: &Fortress) -> Result<(), tonic::Status> {
    use futures::StreamExt as _;
    let part = Some(pb::submit_request::Part::SpecJson(spec_json()));
    let first = futures::stream::iter([pb::SubmitRequest { part, ..Default::default() }]);
    let requests = first.chain(futures::stream::pending());
    block_on(async { client(fortress, "anna").submit(requests).await.map(drop) })
}

/// Returns the TLS settings to connect as `name`.
fn config(certs: &Path, name: &str) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(certs.join("ca.pem")).unwrap() {
        roots.add(certificate.unwrap()).unwrap();
    }
    let chain = vec![CertificateDer::from_pem_file(certs.join(format!("{name}.pem"))).unwrap()];
    let key = PrivateKeyDer::from_pem_file(certs.join(format!("{name}.key"))).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

async fn connect(config: Arc<ClientConfig>, address: &str) -> TlsStream<tokio::net::TcpStream> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    TlsConnector::from(config).connect(ServerName::try_from("127.0.0.1").unwrap(), stream).await.unwrap()
}

/// Sends the handshake and the first bytes of HTTP/2, and no call. The server closes the
/// connection.
async fn say_nothing(config: Arc<ClientConfig>, address: &str) {
    let mut stream = connect(config, address).await;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut rest = Vec::new();
    // An error is an end too: TLS lacks its close message.
    let _ =
        timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("a connection without a call is kept");
}

/// Sends the beginning of a handshake byte by byte, until the server closes the connection.
fn drip(address: &str) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    // A record of 16 KiB, of which only a part is sent.
    for byte in [0x16, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat_n(1, 500)) {
        if stream.write_all(&[byte]).is_err() || is_closed(stream.read(&mut [0; 64])) {
            return;
        }
    }
    panic!("a handshake that drips is kept");
}

fn is_closed(read: std::io::Result<usize>) -> bool {
    match read {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

/// Returns how many connections this process may have, [`CROWD`] at most.
fn crowd_that_fits() -> u64 {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let fit = getrlimit(Resource::Nofile).current.map_or(CROWD, |files| files.saturating_sub(500));
    if fit < CROWD {
        let what = format!("only {fit} connections instead of {CROWD}; raise `ulimit -n`");
        harness::skipped(Lacks::Machine, &what);
    }
    fit.min(CROWD)
}

#[test]
fn a_job_over_mtls_with_tokens_gives_the_same_bits_as_without() {
    let fortress = Fortress::start(2, 3);
    let out = fortress.dir.path().join("out");
    let output = submission(&fortress, &out).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(model(&out) == undisturbed(), "other bits than without locks");
    assert!(!events(&out, "train").is_empty());
    let url = fortress.url.as_str();
    assert!(url.starts_with("https://") && fortress.ps_urls.iter().all(|url| url.starts_with("https://")));
}

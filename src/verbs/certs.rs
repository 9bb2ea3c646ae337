//! `ebb certs`: an authority, certificates and tokens for a laboratory. Users with an authority of
//! their own use that one.
//!
//! ```text
//!   DIR/ca.pem  ca.key            the authority; the key only signs, no process needs it
//!   DIR/NAME.pem  NAME.key        a certificate of it, for master, ps, worker and each user
//!   DIR/NAME.token                a token, for the same
//!   DIR/tokens.toml               their hashes: the list of a server
//! ```
//!
//! Only the owner may read the files; with `--group-reads` the group may too, except for `ca.key`.
//! No file is ever overwritten.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use net::security::TokenRole;
use net::security::tokens::{entry, is_name, written};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use crate::app::App;
use crate::args;

/// The name of every authority that is made here. Authorities differ by their keys.
const AUTHORITY: &str = "ebbflow lab authority";

/// The file that only its owner may read.
const AUTHORITY_KEY: &str = "ca.key";

/// Days until the authority's own certificate expires.
const AUTHORITY_DAYS: u32 = 3650;

/// Time before now from which certificates are valid, because clocks differ.
const SKEW: Duration = Duration::from_secs(3600);

/// Names of a server on its own machine.
const HERE: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// End of a role in `--user` whose token may send scripts.
const WITH_SCRIPTS: &str = "+scripts";

/// Processes that listen, so that their certificates name hosts.
const SERVERS: [&str; 2] = ["master", "ps"];

/// Name and content of a file that is to be made.
type Made = (String, String);

/// # Errors
/// A name is not permitted, a file is there already, or a folder cannot be written.
pub(crate) fn run(verb: args::Certs, app: &App) -> Result<()> {
    match verb {
        args::Certs::Init(args) => init(&args, app),
        args::Certs::Issue(args) => issue(&args, app),
        args::Certs::Token(args) => token(&args, app),
    }
}

fn init(args: &args::CertsInit, app: &App) -> Result<()> {
    let mut holders = vec![
        ("master".to_owned(), TokenRole::Master, false),
        ("ps".to_owned(), TokenRole::Ps, false),
        ("worker".to_owned(), TokenRole::Worker, false),
    ];
    let default = ["user=operate".to_owned()];
    let users = if args.users.is_empty() { &default[..] } else { &args.users };
    for user in users {
        let (name, role) = user.split_once('=').unwrap_or((user, TokenRole::Operate.name()));
        let (role, scripts) = role.strip_suffix(WITH_SCRIPTS).map_or((role, false), |role| (role, true));
        let role: TokenRole = role.parse().map_err(|error: String| anyhow!("--user {user}: {error}"))?;
        check_scripts(role, scripts).with_context(|| format!("--user {user}"))?;
        if holders.iter().any(|(other, ..)| other == name) || name == "ca" || name == "tokens" {
            bail!("--user {user}: `{name}` is taken; give another name");
        }
        holders.push((name.to_owned(), role, scripts));
    }
    let now = now();
    let key = KeyPair::generate().context("make the authority's key")?;
    let ca = authority(now).self_signed(&key).context("sign the authority's certificate")?;
    let mut files = vec![("ca.pem".to_owned(), ca.pem()), (AUTHORITY_KEY.to_owned(), key.serialize_pem())];
    let issuer = Issuer::new(authority(now), key);
    let mut list = String::new();
    for (name, role, scripts) in &holders {
        files.extend(certificate(&issuer, name, &args.hosts, now, args.days)?);
        let token = written(random()?);
        list.push_str(&entry(name, *role, &token, None, None, *scripts));
        list.push('\n');
        files.push((format!("{name}.token"), format!("{token}\n")));
    }
    files.push(("tokens.toml".to_owned(), list));
    let count = files.len();
    make(&args.dir, files, args.group_reads)?;
    let dir = args.dir.display();
    let names: Vec<_> = holders.iter().map(|(name, role, _)| format!("{name} ({role})")).collect();
    app.screen.print(&format!(
        "{dir}: {count} files for {}\n\
         give each process its own three and nobody ca.key:\n\
         {program} master --tls-ca {dir}/ca.pem --tls-cert {dir}/master.pem --tls-key {dir}/master.key \
         --token-file {dir}/master.token --tokens {dir}/tokens.toml ...",
        names.join(", "),
        program = app.program(),
    ))
}

fn issue(args: &args::CertsIssue, app: &App) -> Result<()> {
    let path = args.dir.join(AUTHORITY_KEY);
    let pem = fs::read_to_string(&path).with_context(|| format!("--dir: {}", path.display()))?;
    let key = KeyPair::from_pem(&pem).with_context(|| format!("{}: not a private key", path.display()))?;
    let now = now();
    let made = certificate(&Issuer::new(authority(now), key), &args.name, &args.hosts, now, args.days)?;
    make(&args.out, made.into(), args.group_reads)?;
    app.screen.print(&format!("{}: {name}.pem and {name}.key", args.out.display(), name = args.name))
}

fn token(args: &args::CertsToken, app: &App) -> Result<()> {
    check_name(&args.name)?;
    check_scripts(args.role, args.scripts).context("--scripts")?;
    let token = written(random()?);
    let name = args.file.file_name().with_context(|| format!("--file {}: no file", args.file.display()))?;
    let folder = args.file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    make(folder, vec![(name.to_string_lossy().into_owned(), format!("{token}\n"))], false)?;
    let args::CertsToken { name, role, jobs_max, artifact_bytes_max, scripts, .. } = args;
    app.screen.print(&entry(name, *role, &token, *jobs_max, *artifact_bytes_max, *scripts))
}

/// Returns the certificate of an authority, without its key.
fn authority(now: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(AUTHORITY);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid(&mut params, now, AUTHORITY_DAYS);
    params
}

/// Returns a key and its certificate. Only the certificates of servers are valid for servers, so
/// nobody can use a worker's certificate to stand in for a ps.
fn certificate(
    issuer: &Issuer<'_, KeyPair>,
    name: &str,
    hosts: &[String],
    now: Duration,
    days: u32,
) -> Result<[Made; 2]> {
    check_name(name)?;
    let mut names = Vec::new();
    if is_server(name) {
        names.extend(HERE.map(str::to_owned));
        names.extend(hosts.iter().cloned());
    }
    let mut params = CertificateParams::new(names).with_context(|| format!("--host {}", hosts.join(", ")))?;
    params.distinguished_name = named(name);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if is_server(name) {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    valid(&mut params, now, days);
    let key = KeyPair::generate().context("make a key")?;
    let signed = params.signed_by(&key, issuer).with_context(|| format!("sign the certificate of {name}"))?;
    Ok([(format!("{name}.pem"), signed.pem()), (format!("{name}.key"), key.serialize_pem())])
}

/// True for `master`, `ps`, or one of several: `ps-7`.
fn is_server(name: &str) -> bool {
    let is =
        |server: &str| name.strip_prefix(server).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
    SERVERS.into_iter().any(is)
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

fn valid(params: &mut CertificateParams, now: Duration, days: u32) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(SKEW);
    params.not_after = epoch + now + Duration::from_secs(u64::from(days) * 86_400);
}

fn check_scripts(role: TokenRole, scripts: bool) -> Result<()> {
    if scripts && !role.may_send_scripts() {
        bail!("tokens of the roles submit and operate may send scripts, and none of the role {role}");
    }
    Ok(())
}

fn check_name(name: &str) -> Result<()> {
    if is_name(name) && !name.starts_with('.') {
        return Ok(());
    }
    bail!("`{name}` is no name; expected 1 to 64 letters, digits, `.`, `_`, `-`, `@`")
}

/// Writes files into a folder: all of them, or none if one is there already.
fn make(dir: &Path, files: Vec<Made>, group_reads: bool) -> Result<()> {
    if let Some((name, _)) = files.iter().find(|(name, _)| fs::symlink_metadata(dir.join(name)).is_ok()) {
        bail!(
            "{} is there already, and keys are not overwritten; choose another folder",
            dir.join(name).display()
        );
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("{}: cannot be created", dir.display()))?;
    for (name, content) in files {
        let mode = if group_reads && name != AUTHORITY_KEY { 0o640 } else { 0o600 };
        let path = dir.join(name);
        let written = write(&path, &content, mode);
        written.with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}

fn write(path: &Path, content: &str, mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()
}

/// Random bytes of the system, as a secret needs them.
fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut source = fs::File::open("/dev/urandom").context("/dev/urandom")?;
    io::Read::read_exact(&mut source, &mut bytes).context("/dev/urandom")?;
    Ok(bytes)
}

/// Time since 1970.
#[expect(clippy::disallowed_methods, reason = "a certificate says from when to when it is good")]
fn now() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use client::pipe::Network;
    use net::security::tokens::Tokens;
    use net::security::{Keys, Options};

    use super::*;
    use crate::fake::app;

    fn init_args(dir: &Path) -> args::CertsInit {
        let users = vec!["anna=submit+scripts".to_owned(), "otto".to_owned()];
        args::CertsInit {
            dir: dir.to_owned(),
            hosts: vec!["10.0.0.1".to_owned()],
            users,
            days: 1,
            group_reads: false,
        }
    }

    fn keys(dir: &Path, of: &Path, name: &str) -> Result<Keys, net::security::Error> {
        let file = |end: &str| Some(of.join(format!("{name}.{end}")));
        Keys::load(Options {
            ca: Some(dir.join("ca.pem")),
            cert: file("pem"),
            key: file("key"),
            token: Some(dir.join(format!("{name}.token"))),
            tokens: Some(dir.join("tokens.toml")),
            insecure: false,
        })
    }

    #[test]
    fn everything_is_made_for_its_owner_alone_and_can_be_used() {
        let (root, app) = (tempfile::tempdir().unwrap(), app(&Network::new()));
        let dir = root.path().join("certs");
        init(&init_args(&dir), &app).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir), 0o700);
        let made: Vec<PathBuf> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(made.len(), 2 + 3 * 5 + 1, "{made:?}");
        assert!(made.iter().all(|path| mode(path) == 0o600));
        for name in ["master", "ps", "worker", "anna", "otto"] {
            assert!(keys(&dir, &dir, name).unwrap().encrypts(), "{name}");
        }
        let tokens = Tokens::parse(&fs::read_to_string(dir.join("tokens.toml")).unwrap()).unwrap();
        let role = |name: &str| {
            let token = fs::read_to_string(dir.join(format!("{name}.token"))).unwrap();
            tokens.find(token.trim().as_bytes()).map(|token| (token.role, token.scripts))
        };
        assert_eq!(role("anna"), Some((TokenRole::Submit, true)));
        assert_eq!(role("otto"), Some((TokenRole::Operate, false)));
        assert_eq!(role("worker"), Some((TokenRole::Worker, false)));
        assert_eq!(role("master"), Some((TokenRole::Master, false)));
    }

    #[test]
    fn a_group_may_read_all_but_the_key_of_the_authority() {
        let (root, app) = (tempfile::tempdir().unwrap(), app(&Network::new()));
        let dir = root.path().join("certs");
        init(&args::CertsInit { group_reads: true, ..init_args(&dir) }, &app).unwrap();
        let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("worker.key"), mode("tokens.toml"), mode(AUTHORITY_KEY)), (0o640, 0o640, 0o600));
    }

    #[test]
    fn nothing_is_overwritten() {
        let (root, app) = (tempfile::tempdir().unwrap(), app(&Network::new()));
        fs::write(root.path().join("worker.key"), "mine").unwrap();
        let error = init(&init_args(root.path()), &app).unwrap_err().to_string();
        assert!(error.contains("worker.key is there already"), "{error}");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_certificate_of_the_same_authority_is_made_later() {
        let (root, app) = (tempfile::tempdir().unwrap(), app(&Network::new()));
        let (dir, out) = (root.path().join("certs"), root.path().join("new"));
        init(&init_args(&dir), &app).unwrap();
        let args = args::CertsIssue {
            name: "ps".into(),
            dir: dir.clone(),
            out: out.clone(),
            hosts: vec![],
            days: 1,
            group_reads: false,
        };
        issue(&args, &app).unwrap();
        keys(&dir, &out, "ps").unwrap();
        assert!(issue(&args, &app).unwrap_err().to_string().contains("is there already"));
        let args = args::CertsIssue { name: "../ps".into(), ..args };
        assert!(issue(&args, &app).unwrap_err().to_string().contains("no name"));
    }

    #[test]
    fn a_token_is_written_and_its_entry_printed() {
        let (root, app) = (tempfile::tempdir().unwrap(), app(&Network::new()));
        let file = root.path().join("anna.token");
        let args = args::CertsToken {
            name: "anna".into(),
            role: TokenRole::Submit,
            file: file.clone(),
            jobs_max: Some(2),
            artifact_bytes_max: None,
            scripts: true,
        };
        token(&args, &app).unwrap();
        let found = Tokens::parse(&app.facts()).unwrap();
        let found = found.find(fs::read_to_string(&file).unwrap().trim().as_bytes()).unwrap();
        assert_eq!((found.name.as_str(), found.role, found.jobs_max), ("anna", TokenRole::Submit, Some(2)));
        assert!(found.scripts && token(&args, &app).is_err());
        let worker = args::CertsToken { role: TokenRole::Worker, file: root.path().join("new"), ..args };
        let error = format!("{:#}", token(&worker, &app).unwrap_err());
        assert!(
            error.starts_with("--scripts: tokens of the roles submit") && !worker.file.exists(),
            "{error}"
        );
    }

    #[test]
    fn a_user_who_cannot_be_is_refused() {
        let (root, app) = (tempfile::tempdir().unwrap(), app(&Network::new()));
        for (user, expected) in [
            ("worker", "is taken"),
            ("a=root", "no role `root`"),
            ("a/b=read", "no name"),
            ("a=read+scripts", "may send scripts"),
        ] {
            let args = args::CertsInit { users: vec![user.to_owned()], ..init_args(root.path()) };
            let error = format!("{:#}", init(&args, &app).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! `deploy/hosts/cluster.sh` over a real ssh: an sshd of this test on a free port, a key of its
//! own, up, a job, down.
//!
//! The test needs OpenSSH's server (Debian's openssh-server). It reports a skip without it.
#![cfg(not(feature = "torch"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::harness::machine::{Reserved, find, has, until};
use crate::harness::{self, ebb, ebb_path, root, summary, text};

/// An sshd that knows one key, and the command that reaches it. It ends with its handle.
struct Sshd {
    child: Child,
    ssh: String,
    _address: Reserved,
}

impl Sshd {
    fn start(dir: &Path) -> Option<Self> {
        if !has(&["sshd", "ssh"], "openssh-server openssh-client", "deploy/hosts/cluster.sh is not tried") {
            return None;
        }
        for key in ["host", "user"] {
            let path = dir.join(key);
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status();
            assert!(made.unwrap().success());
        }
        let reserved = Reserved::local();
        let address = reserved.address.clone();
        let port = address.rsplit(':').next().unwrap();
        let at = |name: &str| dir.join(name).display().to_string();
        let config = format!(
            "ListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile {}\nStrictModes no\nUsePAM no\nPermitRootLogin \
             prohibit-password\nPasswordAuthentication no\n",
            at("host"),
            at("user.pub"),
            at("sshd.pid"),
        );
        fs::write(dir.join("config"), config).unwrap();
        // The folder into which sshd changes its root before authentication. A system service would
        // create it.
        let _ = fs::create_dir_all("/run/sshd");
        // sshd starts itself again for each connection, and needs its absolute path.
        let mut command = Command::new(find("sshd").unwrap());
        let child =
            command.args(["-D", "-e", "-f"]).arg(dir.join("config")).stderr(Stdio::null()).spawn().unwrap();
        let ssh = format!(
            "ssh -p {port} -i {} -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile={} -o LogLevel=ERROR",
            at("user"),
            at("known"),
        );
        let sshd = Self { child, ssh, _address: reserved };
        until("sshd listens", Duration::from_secs(120), || TcpStream::connect(&address).is_ok());
        Some(sshd)
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The script and its hosts. The cluster is down in the end in any case.
struct Hosts {
    sshd: Sshd,
    hosts: PathBuf,
    there: PathBuf,
    certs: PathBuf,
}

impl Hosts {
    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(root().join("deploy/hosts/cluster.sh"));
        command.arg(verb).arg(&self.hosts).env("EBB", ebb_path());
        command.env("EBB_SSH", &self.sshd.ssh).env("EBB_DIR", &self.there);
        command.env("EBB_CERTS", &self.certs).env("EBB_DATA", root().join("examples/digits"));
        command
    }

    fn run(&self, verb: &str) -> Output {
        self.command(verb).output().unwrap()
    }

    fn succeed(&self, verb: &str) -> String {
        let output = self.run(verb);
        assert!(output.status.success(), "{verb}: {}", text(&output));
        text(&output)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = self.run("down");
    }
}

#[test]
fn a_cluster_over_ssh_goes_up_trains_and_goes_down() {
    let folder = tempfile::tempdir().unwrap();
    let Some(sshd) = Sshd::start(folder.path()) else { return };
    let reserved = [Reserved::local(), Reserved::local()];
    let [master, ps] = [&reserved[0].address, &reserved[1].address];
    let hosts = folder.path().join("hosts");
    let lines = format!(
        "# a cluster\nmaster localhost {master}\nps localhost {ps}\n\nworker localhost cpu\nworker localhost cpu\n"
    );
    fs::write(&hosts, lines).unwrap();
    let certs = folder.path().join("certs");
    harness::succeed(["certs", "init", "--dir", certs.to_str().unwrap(), "--user", "anna=submit"]);
    let hosts = Hosts { sshd, hosts, there: folder.path().join("there"), certs: certs.clone() };

    let unlocked = text(&hosts.command("up").env_remove("EBB_CERTS").output().unwrap());
    assert!(unlocked.contains("ebb certs init") && unlocked.contains("EBB_INSECURE"), "{unlocked}");
    let up = hosts.succeed("up");
    assert!(up.contains(&format!("EBB_MASTER=https://{master}")) && up.contains("worker-2 started"), "{up}");
    assert!(hosts.succeed("up").contains("master-1 runs already"));
    let out = folder.path().join("out");
    let there = hosts.there.join("keys");
    assert!(there.join("worker.key").exists() && !there.join("ca.key").exists());
    let mut submit = ebb(["submit", "--master", master, "--follow", "--out"]);
    // Over TCP, as from another host.
    let output = submit
        .envs(harness::keys::environment(&certs, "anna"))
        .env("EBB_SOCKETS", "tcp")
        .arg(&out)
        .arg(root().join("examples/digits/job.toml"))
        .args(["--set", "epochs=2", "--set", "fleet.ps=1"])
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(summary(&out)["status"], "succeeded");

    let (down, status) = (hosts.succeed("down"), hosts.succeed("status"));
    for name in ["worker-1", "worker-2", "ps-1", "master-1"] {
        assert!(down.contains(&format!("{name} stopped")), "{down}");
        assert!(status.contains(&format!("{name} does not run")), "{status}");
    }
    assert!(down.find("worker-1") < down.find("ps-1") && down.find("ps-1") < down.find("master-1"), "{down}");
}

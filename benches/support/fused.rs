//! Steps of `torch.optim.Adam(fused=True)` in a process that is asked for them
//! (`benches/peers/adam_fused.py`).

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// PyTorch, in a process of its own.
pub(crate) struct Peer {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the Python of `EBB_PYTHON`, with so many parameters on a device, `cpu` or `cuda:N`.
    /// `None`, said aloud: there is none.
    #[expect(
        clippy::disallowed_methods,
        reason = "a bench is told by the environment which Python has PyTorch"
    )]
    pub(crate) fn start(parameters: usize, device: &str) -> Option<Self> {
        let Some(python) = std::env::var_os("EBB_PYTHON") else {
            eprintln!("SKIPPED: rows of PyTorch; set EBB_PYTHON to a Python that has it");
            return None;
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/peers/adam_fused.py");
        let mut command = Command::new(python);
        command
            .arg(script)
            .args([&parameters.to_string(), device])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("Python starts");
        let asks = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Some(Self { child, asks, answers })
    }

    /// Returns the seconds of a few steps, one number for each.
    pub(crate) fn steps(&mut self, threads: usize) -> Vec<f64> {
        writeln!(self.asks, "{threads}").expect("the peer listens");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the peer answers");
        let answer: serde_json::Value = serde_json::from_str(&line).expect("the peer answers in JSON");
        let seconds = answer["seconds"].as_array().expect("the seconds of its steps");
        seconds.iter().filter_map(serde_json::Value::as_f64).collect()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

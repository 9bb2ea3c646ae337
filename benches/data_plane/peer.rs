//! Raw TCP: the machine's limit between two processes, with blocking sockets and nothing else.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Instant;

const PULL: u8 = 1;
const PUSH: u8 = 2;
const PING: u8 = 3;

/// Runs the child process. It answers `PULL` with `bytes`, `PUSH` and as many bytes with one byte,
/// and `PING` and some bytes with as many as it names.
pub(crate) fn serve(bytes: usize) -> ExitCode {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    println!("{}", listener.local_addr().expect("bound"));
    let (mut stream, _) = listener.accept().expect("the bench connects");
    tune(&stream);
    let mut buffer = vec![3_u8; bytes];
    let mut wish = [0];
    // Ends when the bench closes the connection.
    while stream.read_exact(&mut wish).is_ok() {
        let served = match wish {
            [PULL] => stream.write_all(&buffer),
            [PUSH] => stream.read_exact(&mut buffer).and_then(|()| stream.write_all(&[0])),
            _ => answer(&mut stream, &mut buffer),
        };
        served.expect("the bench reads");
    }
    ExitCode::SUCCESS
}

fn answer(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut sizes = [0; 8];
    stream.read_exact(&mut sizes)?;
    let [up, down] = [0, 4]
        .map(|at| u32::from_le_bytes([sizes[at], sizes[at + 1], sizes[at + 2], sizes[at + 3]]) as usize);
    stream.read_exact(&mut buffer[..up])?;
    stream.write_all(&buffer[..down])
}

/// The bench's end.
pub(crate) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: &str, bytes: usize) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        tune(&stream);
        Ok(Self { stream, buffer: vec![4; bytes] })
    }

    /// Returns the seconds of reading.
    pub(crate) fn pull(&mut self) -> io::Result<f64> {
        let begin = Instant::now();
        self.stream.write_all(&[PULL])?;
        self.stream.read_exact(&mut self.buffer)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Returns the seconds of writing, until the answer.
    pub(crate) fn push(&mut self) -> io::Result<f64> {
        let begin = Instant::now();
        self.stream.write_all(&[PUSH])?;
        self.stream.write_all(&self.buffer)?;
        self.stream.read_exact(&mut [0])?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Returns the seconds of sending `up` bytes and reading `down`.
    pub(crate) fn ping(&mut self, up: usize, down: usize) -> io::Result<f64> {
        let mut request = vec![PING];
        request.extend([up, down].iter().flat_map(|bytes| (*bytes as u32).to_le_bytes()));
        request.resize(request.len() + up, 5);
        let begin = Instant::now();
        self.stream.write_all(&request)?;
        self.stream.read_exact(&mut self.buffer[..down])?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// Sets the options of Ebbflow's own sockets.
fn tune(stream: &TcpStream) {
    stream.set_nodelay(true).expect("a socket");
    let _ = socket2::SockRef::from(stream).set_tcp_congestion(b"cubic");
}

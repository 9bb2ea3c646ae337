//! Memory of a device crosses between processes, and what goes wrong there is named.
//!
//! This program starts itself as other processes, which do what the test says. The driver is the
//! one of `tests/cuda/driver.cpp`. With `EBB_TEST_DRIVER=real` it is the machine's own, and nothing
//! is tried that only the driver of the tests says.
#![expect(
    clippy::disallowed_methods,
    reason = "this program starts itself, and says so through the environment"
)]

use std::env;
use std::io::{BufRead as _, BufReader, Lines, Write as _, stdin};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use kernels::cuda::{Device, Error, Handle, Opened, SOURCE};
use kernels::{Merge, Operand, Storage};
use proto::tensor::DType;
use proto::wire::WireType;

#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the library")]
#[path = "cuda/library.rs"]
mod library;
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole program")]
#[path = "../../tests/harness/skip.rs"]
mod skip;

/// Environment variable with the number of the device that another process opens.
const ORDINAL: &str = "EBB_TEST_ORDINAL";

/// Begins an answer of another process.
const ANSWER: &str = "ANSWER: ";

/// Values in the memory that crosses: not a whole number of the driver's blocks.
const LENGTH: usize = 700_001;

/// Values of a part of this memory.
const PART: usize = 1000;

/// Driver's error for what it does not support.
const NOT_SUPPORTED: &str = "801";

/// Another process of this program, which does what a test says.
struct Process {
    child: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a process with a device of its driver.
    fn start(driver: &Path, ordinal: &str, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env::current_exe().expect("this program has a path"));
        command.args(["--exact", "what_another_process_is_told_to_do", "--nocapture", "--test-threads=1"]);
        command.env(ORDINAL, ordinal).envs(environment.iter().copied());
        if !is_real() {
            let more = env::var("LD_LIBRARY_PATH").unwrap_or_default();
            command.env("LD_LIBRARY_PATH", format!("{}:{more}", driver.display()));
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let commands = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, commands, answers }
    }

    /// Tells the process to do something. Returns its answer.
    fn ask(&mut self, command: &str) -> String {
        writeln!(self.commands, "{command}").expect("the other process listens");
        loop {
            let line = self.answers.next();
            let line = line.unwrap_or_else(|| panic!("`{command}` ended the other process")).expect("a text");
            // The test runner writes on the same line.
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return answer.to_owned();
            }
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Not a test: what another process of this program does.
#[test]
fn what_another_process_is_told_to_do() {
    let Ok(ordinal) = env::var(ORDINAL) else { return };
    library::load_nvrtc();
    let device = Device::open(ordinal.parse().expect("a number"), None);
    let mut other = None;
    for command in stdin().lines() {
        let command = command.expect("a text");
        let answer = match &device {
            Ok(device) => other.get_or_insert_with(|| Other::new(device)).answer(&command),
            Err(Error::NoCompiler) => "no NVRTC".to_owned(),
            Err(error) => format!("no device: {error}"),
        };
        println!("{ANSWER}{answer}");
    }
}

/// The state of another process.
struct Other {
    device: Arc<Device>,
    exported: Option<Storage>,
    opened: Vec<Arc<Opened>>,
}

impl Other {
    fn new(device: &Arc<Device>) -> Self {
        Self { device: device.clone(), exported: None, opened: Vec::new() }
    }

    /// Does what it is told.
    fn answer(&mut self, command: &str) -> String {
        let (verb, argument) = command.split_once(' ').unwrap_or((command, ""));
        self.try_to(verb, argument).unwrap_or_else(|error| {
            let name = match error {
                Error::NotShared { .. } => "not shared",
                Error::OtherDevice { .. } => "other device",
                Error::Gone { .. } => "gone",
                _ => "failed",
            };
            format!("{name}: {error}")
        })
    }

    fn try_to(&mut self, verb: &str, argument: &str) -> Result<String, Error> {
        let float = || argument.parse::<f32>().expect("a number");
        match verb {
            "export" => {
                let (storage, handle) = Storage::exported(&self.device, DType::F32, LENGTH)?;
                self.exported = Some(storage);
                return Ok(hexadecimal(&handle.to_bytes()));
            }
            "fill" => {
                self.exported.as_mut().expect("exported").fill(float());
                self.device.settle()?;
            }
            "place" => {
                let (at, value) = at_and_value(argument);
                let values = value.to_le_bytes().repeat(PART);
                self.exported.as_mut().expect("exported").place(at, &values);
                self.device.settle()?;
            }
            "free" => self.exported = None,
            "open" => {
                let message = bytes(argument);
                let handle = Handle::from_bytes(&message).expect("a handle");
                self.opened.push(Arc::new(Opened::open(&self.device, DType::F32, &handle)?));
            }
            "close" => drop(self.opened.pop().expect("opened")),
            "read" => {
                let mut there = Storage::zeros(DType::F32, LENGTH);
                there.receive(self.opened.last().expect("opened"))?;
                return Ok(told(&there));
            }
            // The memory is closed when the sum has not run yet.
            "add" => {
                let mut sum = Storage::on_device(&self.device, DType::F32, LENGTH)?;
                sum.fill(float());
                let opened = self.opened.pop().expect("opened");
                sum.merge(Operand::Stored(&opened), Merge::Sum(WireType::F32));
                drop(opened);
                let mut there = Storage::zeros(DType::F32, LENGTH);
                there.receive(&sum)?;
                return Ok(told(&there));
            }
            // So it is with a part, which keeps the memory open.
            "add_part" => {
                let (at, value) = at_and_value(argument);
                let part = self.opened.pop().expect("opened").part(DType::F32, at, PART * 4);
                let mut sum = Storage::on_device(&self.device, DType::F32, PART)?;
                sum.fill(value);
                sum.merge(Operand::Stored(&part), Merge::Sum(WireType::F32));
                drop(part);
                let mut there = Storage::zeros(DType::F32, PART);
                there.receive(&sum)?;
                return Ok(told(&there));
            }
            // The sum is queued before, and has not run when the part is written.
            "write_part" => {
                let (at, value) = at_and_value(argument);
                let mut sum = Storage::on_device(&self.device, DType::F32, PART)?;
                sum.fill(value);
                sum.merge(Operand::Payload(&1_f32.to_le_bytes().repeat(PART)), Merge::Sum(WireType::F32));
                let mut part = self.opened.pop().expect("opened").part(DType::F32, at, PART * 4);
                part.write(Operand::Stored(&sum));
                drop((part, sum));
                self.device.settle()?;
            }
            "fetch" => {
                let at = argument.parse().expect("a number");
                let mut there = Storage::zeros(DType::F32, PART);
                there.receive_part(self.exported.as_ref().expect("exported"), at, PART * 4)?;
                return Ok(told(&there));
            }
            "taken" => return Ok(self.opened.last().expect("opened").taken_bytes().to_string()),
            "settle" => self.device.settle()?,
            _ => panic!("no command `{verb}`"),
        }
        Ok("done".to_owned())
    }
}

/// Returns the place of a part in bytes, and a value.
fn at_and_value(argument: &str) -> (usize, f32) {
    let (at, value) = argument.split_once(' ').expect("a place and a value");
    (at.parse().expect("a number"), value.parse().expect("a number"))
}

/// Returns the value of all elements, if they have one value.
fn told(storage: &Storage) -> String {
    let bytes = storage.bytes();
    let values = bytes.as_chunks().0;
    let is_one = values.iter().all(|value| *value == values[0]);
    if is_one { f32::from_le_bytes(values[0]).to_string() } else { "values that differ".to_owned() }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().as_chunks::<2>().0.iter();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(str::from_utf8(pair).expect("a text"), 16);
    pairs.map(|pair| byte(pair).expect("hexadecimal")).collect()
}

fn is_real() -> bool {
    env::var("EBB_TEST_DRIVER").is_ok_and(|driver| driver == "real")
}

/// One test, because all of it needs one driver, which takes seconds to build.
#[test]
fn memory_of_a_device_crosses_between_processes_and_what_goes_wrong_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    if !is_real() {
        library::build("driver.cpp", SOURCE, folder.path(), "libcuda.so");
    }
    let start = |ordinal: &str, environment: &[_]| Process::start(folder.path(), ordinal, environment);
    let (mut exporter, mut reader) = (start("0", &[]), start("0", &[]));
    let handle = exporter.ask("export");
    if handle == "no NVRTC" {
        return skip::skipped(skip::Lacks::Package, "no NVRTC: no memory crossed between processes");
    }
    if is_real() && handle.starts_with("not shared") {
        return skip::skipped(skip::Lacks::Machine, &format!("this machine refuses: {handle}"));
    }
    the_first_values_may_be_written_by_the_process_that_opened_the_memory(
        &mut exporter,
        &mut reader,
        &handle,
    );
    values_cross_as_often_as_they_change(&mut exporter, &mut reader, &handle);
    parts_are_written_and_read_alone(&mut exporter, &mut reader, &handle);
    parts_are_written_by_the_process_that_opened_them(&mut exporter, &mut reader, &handle);
    wrong_handles_are_refused(&mut exporter, &mut reader, &handle);
    if !is_real() {
        a_driver_that_passes_no_memory_is_named(start("0", &[("EBB_TEST_IPC", NOT_SUPPORTED)]), &handle);
        let mut elsewhere = start("1", &[("EBB_TEST_DEVICES", "2")]);
        let refused = elsewhere.ask(&format!("open {handle}"));
        assert!(refused.starts_with("other device: memory of another process lies on"), "{refused}");
        assert!(refused.contains("000000000000, and CUDA device 1 of this process is 0000"), "{refused}");
        assert_eq!(elsewhere.ask("settle"), "done", "it goes on");
        let peers = &[("EBB_TEST_DEVICES", "2"), ("EBB_TEST_PEERS", "1")];
        devices_with_access_to_each_other_exchange(&mut start("0", peers), &mut start("1", peers));
    }
    freed_memory_is_gone(&mut exporter, &mut reader);
    a_dead_exporter_is_contained(exporter, reader);
}

fn the_first_values_may_be_written_by_the_process_that_opened_the_memory(
    exporter: &mut Process,
    reader: &mut Process,
    handle: &str,
) {
    assert_eq!(reader.ask(&format!("open {handle}")), "done");
    assert_eq!(reader.ask("write_part 4096 6"), "done");
    assert_eq!(exporter.ask("fetch 4096"), "7", "zeros lie over it");
    assert_eq!(exporter.ask("fill 0"), "done");
}

fn values_cross_as_often_as_they_change(exporter: &mut Process, reader: &mut Process, handle: &str) {
    let open = format!("open {handle}");
    assert_eq!(reader.ask(&open), "done");
    assert_eq!(reader.ask("read"), "0");
    for value in ["2.5", "-7"] {
        assert_eq!(exporter.ask(&format!("fill {value}")), "done");
        assert_eq!(reader.ask("read"), value);
    }
    // Twice: the first stays open when the second is closed.
    assert_eq!(reader.ask(&open), "done");
    assert_eq!(reader.ask("add 100"), "93");
    assert_eq!(reader.ask("read"), "-7");
    assert_eq!(reader.ask("add 10"), "3", "the memory was closed before it was read");
    assert_eq!(reader.ask(&open), "done", "it can be opened again");
    assert_eq!([reader.ask("read"), reader.ask("close")], ["-7", "done"]);
}

fn parts_are_written_and_read_alone(exporter: &mut Process, reader: &mut Process, handle: &str) {
    assert_eq!(exporter.ask("fill -7"), "done");
    for (at, value) in [("0", "1"), ("4096", "2.5"), ("8192", "4")] {
        assert_eq!(exporter.ask(&format!("place {at} {value}")), "done");
    }
    for (at, sum) in [("0", "11"), ("4096", "12.5"), ("8192", "14"), ("12288", "3")] {
        assert_eq!(reader.ask(&format!("open {handle}")), "done");
        assert_eq!(reader.ask(&format!("add_part {at} 10")), sum, "the part from byte {at} on");
    }
}

fn parts_are_written_by_the_process_that_opened_them(
    exporter: &mut Process,
    reader: &mut Process,
    handle: &str,
) {
    assert_eq!(exporter.ask("fill -7"), "done");
    for (at, value, sum) in [("4096", "1.5", "2.5"), ("12288", "9", "10"), ("4096", "3", "4")] {
        assert_eq!(reader.ask(&format!("open {handle}")), "done");
        assert_eq!(reader.ask(&format!("write_part {at} {value}")), "done");
        assert_eq!(exporter.ask(&format!("fetch {at}")), sum, "the part from byte {at} on");
    }
    for at in ["0", "8192", "16384"] {
        assert_eq!(exporter.ask(&format!("fetch {at}")), "-7", "nobody has written to byte {at}");
    }
}

fn devices_with_access_to_each_other_exchange(exporter: &mut Process, reader: &mut Process) {
    let handle = exporter.ask("export");
    values_cross_as_often_as_they_change(exporter, reader, &handle);
    parts_are_written_by_the_process_that_opened_them(exporter, reader, &handle);
    assert_eq!(reader.ask(&format!("open {handle}")), "done");
    assert_eq!(reader.ask("taken"), "0", "the memory takes nothing of the device that opened it");
}

fn wrong_handles_are_refused(exporter: &mut Process, reader: &mut Process, handle: &str) {
    let refused = exporter.ask(&format!("open {handle}"));
    assert!(refused.starts_with("not shared: "), "its own memory: {refused}");

    let mut message = bytes(handle);
    message[16..24].copy_from_slice(&(1_u64 << 40).to_le_bytes());
    let refused = reader.ask(&format!("open {}", hexadecimal(&message)));
    let expected = "bytes, its handle says 1099511627776";
    assert!(refused.starts_with("not shared: ") && refused.contains(expected), "{refused}");

    if !is_real() {
        // One byte beyond the whole blocks of the driver.
        let all = (LENGTH * 4).next_multiple_of(2 << 20);
        message[16..24].copy_from_slice(&(all as u64 + 1).to_le_bytes());
        let refused = reader.ask(&format!("open {}", hexadecimal(&message)));
        let expected = format!("it has {all} bytes, its handle says {}", all + 1);
        assert!(refused.contains(&expected), "{refused}");

        message[24..].fill(0xff);
        let refused = reader.ask(&format!("open {}", hexadecimal(&message)));
        assert!(refused.starts_with("not shared: "), "bytes that are no handle: {refused}");
    }
    assert_eq!([reader.ask("settle"), exporter.ask("settle")], ["done", "done"], "both go on");
}

fn a_driver_that_passes_no_memory_is_named(mut process: Process, handle: &str) {
    let expected = "not shared: CUDA device 0 could not export memory: ";
    for _ in 0..2 {
        let refused = process.ask("export");
        assert!(refused.starts_with(expected) && refused.contains("NOT_SUPPORTED"), "{refused}");
    }
    let refused = process.ask(&format!("open {handle}"));
    let expected = "not shared: CUDA device 0 could not open memory of another process: ";
    assert!(refused.starts_with(expected), "{refused}");
    assert!(refused.ends_with("pass the values through memory of the host"), "{refused}");
    assert_eq!(process.ask("settle"), "done", "the device goes on");
}

fn freed_memory_is_gone(exporter: &mut Process, reader: &mut Process) {
    let handle = exporter.ask("export");
    assert_eq!(exporter.ask("free"), "done");
    let refused = reader.ask(&format!("open {handle}"));
    if !is_real() {
        assert!(refused.starts_with("gone: CUDA device 0 could not open memory of another"), "{refused}");
        assert!(refused.ends_with("has freed it or has ended; ask it again"), "{refused}");
    }
    assert_ne!(refused, "done");
    assert_eq!([reader.ask("settle"), exporter.ask("settle")], ["done", "done"], "both go on");
}

fn a_dead_exporter_is_contained(mut exporter: Process, mut reader: Process) {
    let handle = exporter.ask("export");
    assert_eq!(exporter.ask("fill 5"), "done");
    assert_eq!(reader.ask(&format!("open {handle}")), "done");
    exporter.kill();
    // NVIDIA does not say what a reader finds. It answers, whatever it finds.
    let found = reader.ask("read");
    assert!(is_real() || found == "5", "{found}");
    let refused = reader.ask(&format!("open {handle}"));
    assert!(is_real() || refused.starts_with("gone: "), "{refused}");
    let sum = reader.ask("add 1");
    assert!(is_real() || sum == "6", "{sum}");
    assert!(is_real() || reader.ask("settle") == "done", "the reader goes on");
}

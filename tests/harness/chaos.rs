//! A fleet under chaos: a script, drawn from a seed, that kills, stops, drains and adds workers
//! while a job runs.
//!
//! The seed decides the order of the faults. The machine's speed decides when exactly they meet the
//! job. The first fault is a stop, so that the worker wakes up while the job still runs. The script
//! leaves a worker that woke up alone until it has worked again.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use ebbflow::random::Keyed;

use super::{Cluster, JOINED, Process, REGISTERED, events};

/// Time for which a stopped worker stands still. It is longer than the master's limit of silence
/// (`death`, 5 s), so other workers get its leases.
pub const STOP: Duration = Duration::from_secs(7);

/// Fault of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    Kill,
    Stop,
    Drain,
    Add,
}

/// State of a worker, as the script changed it.
enum Life {
    /// It takes no part yet: a signal would meet a program that does not handle it.
    Starts,
    Works,
    Stopped(Instant),
    /// Awake, with a log of this length at that time. It has not been seen working again.
    Woken(usize),
    Killed,
    Draining,
    /// Drained and ended with this status.
    Drained(ExitStatus),
}

/// A cluster, and the state of its workers.
pub struct Chaos {
    pub cluster: Cluster,
    /// Number of workers that the script aims at.
    workers: usize,
    keyed: Keyed,
    lives: Vec<Life>,
    pub faults: BTreeMap<Fault, u32>,
    /// Number of workers that were seen working again after a stop.
    pub returned: u32,
    log: Vec<String>,
}

impl Chaos {
    /// Creates the script. It keeps up the number of workers of `cluster` by adding new ones.
    pub fn new(seed: u64, cluster: Cluster) -> Self {
        let workers = cluster.workers.len();
        let lives = (0..workers).map(|_| Life::Starts).collect();
        let (faults, log) = (BTreeMap::new(), Vec::new());
        Self { cluster, workers, keyed: Keyed::new(seed, "chaos", 0), lives, faults, returned: 0, log }
    }

    /// Strikes every second or two until `job` has ended.
    pub fn rage(&mut self, job: &mut Child, out: &Path) {
        let mut next = None;
        while job.try_wait().expect("the job's process").is_none() {
            // The pause sets the rhythm of the faults. It does not wait for a state.
            std::thread::park_timeout(Duration::from_millis(50));
            self.look();
            let now = now();
            if next.is_none() && out.join("metrics.jsonl").exists() && !events(out, "train").is_empty() {
                next = Some(now);
            }
            if next.is_some_and(|next| next <= now) {
                self.strike();
                next = Some(now + Duration::from_millis(1000 + self.keyed.next_u64() % 1000));
            }
        }
        self.look();
    }

    /// Notes which workers woke up, work again or have left.
    fn look(&mut self) {
        let Cluster { workers, master, .. } = &mut self.cluster;
        for ((worker, process), life) in workers.iter_mut().enumerate().zip(&mut self.lives) {
            match *life {
                Life::Stopped(since) if since.elapsed() >= STOP => {
                    *life = Life::Woken(process.log().len());
                    process.signal("CONT");
                }
                Life::Starts if news_of(master, worker).contains(JOINED) => *life = Life::Works,
                Life::Woken(before) if works_again(&process.log()[before..]) => {
                    *life = Life::Works;
                    self.returned += 1;
                }
                Life::Draining => {
                    if let Some(status) = process.child.try_wait().expect("a worker's process") {
                        *life = Life::Drained(status);
                    }
                }
                _ => {}
            }
        }
    }

    fn strike(&mut self) {
        let present =
            |life: &&Life| matches!(life, Life::Starts | Life::Works | Life::Stopped(_) | Life::Woken(_));
        let present = self.lives.iter().filter(present).count();
        // The master may have given up one that was too slow to say that it lives.
        let is_known = |worker: &usize| news_of(&self.cluster.master, *worker).contains(JOINED);
        let at_work = |(worker, life): (usize, &Life)| matches!(life, Life::Works).then_some(worker);
        let at_work = self.lives.iter().enumerate().filter_map(at_work).filter(is_known);
        let at_work: Vec<usize> = at_work.collect();
        let draw = self.keyed.next_u64();
        let victim = at_work.get((draw >> 8) as usize % at_work.len().max(1)).copied();
        // One worker always works, so that the job goes on. The more are missing, the likelier one
        // is added.
        let missing = self.workers.saturating_sub(present) as u64;
        let (fault, worker) = match victim {
            Some(worker) if at_work.len() > 1 && draw % 4 >= 2 * missing => {
                let fault = match self.faults.is_empty() {
                    true => Fault::Stop,
                    false => [Fault::Kill, Fault::Kill, Fault::Stop, Fault::Drain][(draw >> 4) as usize % 4],
                };
                (fault, worker)
            }
            _ => (Fault::Add, self.lives.len()),
        };
        match fault {
            Fault::Kill => {
                self.cluster.workers[worker].signal("KILL");
                self.lives[worker] = Life::Killed;
            }
            Fault::Stop => {
                self.cluster.workers[worker].signal("STOP");
                self.lives[worker] = Life::Stopped(now());
            }
            Fault::Drain => {
                self.cluster.workers[worker].signal("TERM");
                self.lives[worker] = Life::Draining;
            }
            Fault::Add => {
                self.cluster.add_worker();
                self.lives.push(Life::Starts);
            }
        }
        *self.faults.entry(fault).or_default() += 1;
        self.log.push(format!("{fault} worker-{worker}"));
    }

    pub fn count(&self, fault: Fault) -> u32 {
        self.faults.get(&fault).copied().unwrap_or(0)
    }

    /// Checks what must hold for every worker.
    pub fn check(&mut self) {
        let Cluster { workers, master, .. } = &mut self.cluster;
        for ((worker, process), life) in workers.iter_mut().enumerate().zip(&self.lives) {
            match life {
                Life::Drained(status) => {
                    assert!(status.success(), "worker-{worker} drained and ended with {status}");
                }
                Life::Draining => {
                    let status = process.child.wait().expect("a worker's process");
                    assert!(status.success(), "worker-{worker} drained and ended with {status}");
                }
                // The broken connection shows the death at once. Silence would cost the others 5 s.
                Life::Killed => {
                    while news_of(master, worker).contains(JOINED) {
                        std::thread::park_timeout(Duration::from_millis(50));
                    }
                    assert!(
                        !news_of(master, worker).contains(SILENT),
                        "worker-{worker} was killed, and the master waited for its heartbeat"
                    );
                }
                // The worker may have woken up a moment before the end. The master that gave it up
                // takes it again.
                Life::Woken(before) if news_of(master, worker).contains(SILENT) => {
                    while !process.log()[*before..].contains(REGISTERED) {
                        let ended = process.child.try_wait().expect("a worker's process");
                        assert!(ended.is_none(), "worker-{worker} woke up and ended:\n{}", process.log());
                        std::thread::park_timeout(Duration::from_millis(50));
                    }
                }
                Life::Woken(_) => {}
                Life::Starts | Life::Works | Life::Stopped(_) => {}
            }
        }
    }
}

/// Words of a master about a process that it has given up because of its silence.
const SILENT: &str = "sent no heartbeat";

/// Returns the newest line of the master's log about a worker: it has joined, or why it is gone.
/// Empty: it has never joined.
fn news_of(master: &Process, worker: usize) -> String {
    let name = format!("worker `worker-{worker}` (");
    master.log().lines().rfind(|line| line.contains(&name)).unwrap_or_default().to_owned()
}

/// Returns whether a worker that stood still is a new member whose work counts. `log` is what it
/// logged since: a line for each registration and each finished lease.
fn works_again(log: &str) -> bool {
    log.find(REGISTERED).is_some_and(|at| log[at..].contains("accepted=true"))
}

#[expect(clippy::disallowed_methods, reason = "the script acts on real processes in real time")]
fn now() -> Instant {
    Instant::now()
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Drain => "drain",
            Self::Add => "add",
        })
    }
}

impl fmt::Display for Chaos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.log.join(", "))
    }
}

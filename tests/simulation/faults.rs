//! The faults of a run, as its [`Plan`] has them.

use std::collections::BTreeMap;
use std::time::Duration;

use ebbflow::random::Keyed;
use futures::{FutureExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use proto::checkpoint::PROBE;
use turmoil::Sim;

use crate::cluster::Cluster;
use crate::plan::{Dice, Plan};
use crate::{ambient, checks};

/// Most crashes at changes of phase in one run.
const AT_PHASE_MAX: u32 = 8;

/// Chance in a tenth of a second that space on the journal's disk is freed.
const JOURNAL_MEND: f32 = 0.1;

/// Kind of a broken link between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    Both,
    /// Only messages from the first to the second are lost.
    OneWay,
    /// Nothing is lost, and everything is late.
    Hold,
}

pub(crate) struct Faults<'a> {
    plan: &'a Plan,
    dice: Dice,
    /// Random numbers for changes of phase. They are separate, so that these faults do not change
    /// the others.
    edges: Dice,
    /// Most crashes at changes of phase that are still to come. Each crash makes more such changes.
    at_phase_left: u32,
    /// Broken links by their two hosts.
    cuts: BTreeMap<(String, String), Cut>,
    /// Workers that have yet to join.
    late: Vec<String>,
}

impl<'a> Faults<'a> {
    pub(crate) fn new(seed: u64, plan: &'a Plan, late: Vec<String>) -> Self {
        let dice = |purpose| Dice(Keyed::new(seed, purpose, 0));
        let (dice, edges) = (dice("faults"), dice("faults/edges"));
        Self { plan, dice, edges, at_phase_left: AT_PHASE_MAX, cuts: BTreeMap::new(), late }
    }

    /// Draws the faults of a tenth of a second.
    pub(crate) fn strike(&mut self, sim: &mut Sim<'_>, cluster: &Cluster) {
        let plan = self.plan;
        if self.dice.happens(plan.clock_jump) {
            let ms = self.dice.range(0, 7_200_000);
            ambient::jump(|wall| wall + Duration::from_millis(ms) - Duration::from_secs(3600));
            checks::count("wall clock jumps");
        }
        while !self.late.is_empty() && self.dice.happens(plan.join) {
            self.join(sim, cluster);
        }
        let hosts: Vec<&str> = cluster.hosts(&self.late).collect();
        for (host, crash) in hosts.iter().copied().map(|host| (host, plan.crash_of(host))) {
            if !sim.is_host_running(host) {
                if self.dice.happens(plan.restart) {
                    start(sim, host);
                }
            } else if self.dice.happens(crash) {
                kill(sim, host);
                checks::count(format!("{} crashes", role(host)));
            } else if self.dice.happens(plan.drain_of(host)) {
                cluster.drain(host);
                checks::count(format!("{} drains", role(host)));
            }
        }
        if plan.all_crash > 0.0 && self.dice.happens(plan.all_crash) {
            crash(sim, &hosts);
            checks::count("crashes of everything");
        }
        if plan.all_lost > 0.0 && self.dice.happens(plan.all_lost) {
            crash(sim, &hosts);
            cluster.lose_master();
            checks::forget();
            checks::count("losses of everything but the store");
        }
        if plan.rot > 0.0 && self.dice.happens(plan.rot) {
            self.rot(&cluster.disk.files);
        }
        if plan.saves.is_some() {
            self.strike_store(cluster);
        }
        self.strike_master(cluster);
        for worker in cluster.may_hang() {
            if self.edges.happens(plan.hang) {
                cluster.hang(worker);
            }
        }
        for (cut, chance) in [(Cut::Both, plan.cut), (Cut::OneWay, plan.cut_one_way), (Cut::Hold, plan.hold)]
        {
            for &host in &hosts {
                let steady = plan.steady_ps && role(host) == "ps";
                if role(host) != "master" && !steady && self.dice.happens(chance) {
                    self.cut(sim, cluster, host, cut);
                }
            }
        }
        let pairs: Vec<_> = self.cuts.iter().map(|(pair, cut)| (pair.clone(), *cut)).collect();
        for (pair, cut) in pairs {
            if self.dice.happens(if cut == Cut::Hold { plan.release } else { plan.mend }) {
                self.cuts.remove(&pair);
                mend(sim, &pair.0, &pair.1);
            }
        }
    }

    /// Ends all faults, and starts what has ended.
    pub(crate) fn end(&mut self, sim: &mut Sim<'_>, cluster: &Cluster) {
        while !self.late.is_empty() {
            self.join(sim, cluster);
        }
        sim.set_fail_rate(0.0);
        cluster.disk.heal();
        cluster.journal.heal();
        self.cuts.clear();
        for host in cluster.hosts(&[]) {
            if !sim.is_host_running(host) {
                start(sim, host);
            }
            for peer in cluster.peers(host) {
                mend(sim, host, peer);
            }
        }
    }

    /// Draws a fault at a change of phase: one of the processes that act next may die now.
    pub(crate) fn strike_at_phase(&mut self, sim: &mut Sim<'_>, cluster: &Cluster) {
        if self.at_phase_left == 0 || !self.edges.happens(self.plan.at_phase) {
            return;
        }
        let dies = |host: &&str| !(self.plan.steady_ps && role(host) == "ps");
        let hosts: Vec<&str> = cluster.hosts(&self.late).filter(dies).collect();
        // The first host is the master, which has more to lose at such a moment than the others.
        let any = self.edges.range(0, hosts.len() as u64 - 1) as usize;
        let host = hosts[if self.edges.one_in(2) { 0 } else { any }];
        if sim.is_host_running(host) {
            self.at_phase_left -= 1;
            kill(sim, host);
            checks::count(format!("{} crashes at a change of phase", role(host)));
        }
    }

    /// Draws faults of the master: its process stands still, or its journal fills up or is cleared.
    fn strike_master(&mut self, cluster: &Cluster) {
        if self.edges.happens(self.plan.master_stop) {
            cluster.stop_master(Duration::from_millis(self.edges.range(500, 20_000)));
            checks::count("stops of the master");
        }
        if self.edges.happens(self.plan.journal_full) {
            cluster.journal.fill(true);
            checks::count("full disks of the master");
        }
        if self.edges.happens(JOURNAL_MEND) {
            cluster.journal.fill(false);
        }
    }

    /// Draws faults of the store: the disk fills up or becomes unreachable, and recovers.
    fn strike_store(&mut self, cluster: &Cluster) {
        let (plan, disk) = (self.plan, &cluster.disk);
        if self.dice.happens(plan.store_full) {
            disk.fill(true);
            checks::count("full disks");
        }
        if self.dice.happens(plan.store_away) {
            disk.cut(true);
            checks::count("stores that went away");
        }
        if self.dice.happens(plan.store_mend) {
            disk.fill(false);
        }
        if self.dice.happens(plan.store_mend) {
            disk.cut(false);
        }
    }

    /// Damages a file of a checkpoint. The store answers at once, so nothing is awaited.
    fn rot(&mut self, store: &InMemory) {
        let files = store.list(None).try_collect::<Vec<_>>().now_or_never().expect("at once").unwrap();
        // A probe exists for moments. A ps and a master that do not see the same probe have no
        // store in common.
        let is_probe = |path: &Path| path.filename().is_some_and(|name| name.starts_with(PROBE));
        let paths = files.into_iter().map(|file| file.location);
        let mut paths: Vec<_> = paths.filter(|path| !is_probe(path)).collect();
        paths.sort();
        if paths.is_empty() {
            return;
        }
        let path = &paths[self.dice.range(0, paths.len() as u64 - 1) as usize];
        let bytes = async { store.get(path).await?.bytes().await };
        let mut bytes = bytes.now_or_never().expect("at once").unwrap().to_vec();
        let last = bytes.len().max(1) - 1;
        // Every other time among the values, which are a small part at the end of such small files.
        let first = if self.dice.happens(0.5) { last - last.min(200) } else { 0 };
        let at = self.dice.range(first as u64, last as u64) as usize;
        match self.dice.range(0, 2) {
            0 => store.delete(path).now_or_never().expect("at once").unwrap(),
            1 => {
                bytes.truncate(at);
                drop(store.put(path, bytes.into()).now_or_never().expect("at once").unwrap());
            }
            _ => {
                bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (at % 8));
                drop(store.put(path, bytes.into()).now_or_never().expect("at once").unwrap());
            }
        }
        checks::count("damaged files of checkpoints");
    }

    fn join(&mut self, sim: &mut Sim<'_>, cluster: &Cluster) {
        if let Some(worker) = self.late.pop() {
            cluster.start_worker(sim, &worker);
            checks::count("late joins");
        }
    }

    /// Cuts a process off from one peer (from the master in every third case) or from all of them.
    fn cut(&mut self, sim: &mut Sim<'_>, cluster: &Cluster, host: &str, cut: Cut) {
        let peers: Vec<&str> = cluster.peers(host).collect();
        let only = if self.dice.one_in(3) { 0 } else { self.dice.range(0, peers.len() as u64) as usize };
        let outward = self.dice.one_in(2);
        for (index, peer) in peers.iter().enumerate() {
            let pair = (host.to_owned(), (*peer).to_owned());
            if (only != index && only != peers.len()) || self.cuts.contains_key(&pair) {
                continue;
            }
            match cut {
                Cut::Both => sim.partition(host, *peer),
                Cut::OneWay if outward => sim.partition_oneway(host, *peer),
                Cut::OneWay => sim.partition_oneway(*peer, host),
                Cut::Hold => sim.hold(host, *peer),
            }
            self.cuts.insert(pair, cut);
            checks::count(match cut {
                Cut::Both => "cuts",
                Cut::OneWay => "one-way cuts",
                Cut::Hold => "holds",
            });
        }
    }
}

impl Plan {
    fn crash_of(&self, host: &str) -> f32 {
        match role(host) {
            "worker" => self.worker_crash,
            "ps" => self.ps_crash,
            _ => self.master_crash,
        }
    }

    fn drain_of(&self, host: &str) -> f32 {
        match role(host) {
            "worker" => self.worker_drain,
            "ps" => self.ps_drain,
            _ => 0.0,
        }
    }
}

fn crash(sim: &mut Sim<'_>, hosts: &[&str]) {
    for host in hosts.iter().copied().filter(|host| sim.is_host_running(*host)).collect::<Vec<_>>() {
        kill(sim, host);
    }
}

/// Kills a process.
pub(crate) fn kill(sim: &mut Sim<'_>, host: &str) {
    sim.crash(host);
    checks::gone(host);
}

/// Starts a process again that has ended.
pub(crate) fn start(sim: &mut Sim<'_>, host: &str) {
    sim.bounce(host);
    checks::gone(host);
    checks::count(format!("{} restarts", role(host)));
}

fn mend(sim: &Sim<'_>, host: &str, peer: &str) {
    // `release` delivers held messages, `repair` joins a cut link.
    sim.release(host, peer);
    sim.repair(host, peer);
}

/// Returns "master", "ps" or "worker".
fn role(host: &str) -> &str {
    host.split('-').next().unwrap_or(host)
}

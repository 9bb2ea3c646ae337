//! How fast the input pipeline of a job is by itself, as a whole and step by step.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use proto::ids::Epoch;
use proto::spec::{DataSet, JobSpec};

use crate::clock::now;
use crate::dataset::Dataset;
use crate::error::Result;

/// What an input pipeline reaches without a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Records of the training set.
    pub records: u64,
    /// Time to open the files.
    pub opening: Duration,
    /// Time per record of each step in one thread: reading, then each transform of each column.
    pub steps: Vec<(String, Duration)>,
    /// Records for each second in whole batches, with all threads.
    pub rate: f64,
    /// Threads that made batches.
    pub threads: usize,
}

/// Reads the training records of a job in the order of its first epochs: for half of `time` step by
/// step in one thread, then for the other half as batches in `threads` threads. The call blocks.
///
/// # Errors
/// A file is missing, damaged, or does not fit the specification.
pub fn measure(spec: &JobSpec, root: Option<&Path>, threads: usize, time: Duration) -> Result<Measured> {
    let began = now();
    let data = Dataset::open(spec, DataSet::Train, root)?;
    let opening = began.elapsed();
    let plan = spec.plan(data.len());
    let order = spec.order(&data.shards(), Epoch(0));
    // Positions repeat, so that a small data set takes the whole time.
    let positions = |microbatch: u64| {
        let micro = u64::from(plan.micro);
        let begin = (microbatch % data.len().div_ceil(micro)) * micro;
        order.records(begin..(begin + micro).min(data.len()))
    };

    let (mut steps, mut seen, began) = (Vec::new(), 0, now());
    for microbatch in 0.. {
        for record in positions(microbatch) {
            data.time(Epoch(0), record, &mut steps)?;
            seen += 1;
        }
        if began.elapsed() > time / 2 {
            break;
        }
    }
    for (_, total) in &mut steps {
        *total /= seen;
    }

    let (next, samples, began) = (AtomicU64::new(0), AtomicU64::new(0), now());
    thread::scope(|scope| {
        let read = || -> Result<()> {
            loop {
                let microbatch = next.fetch_add(1, Ordering::Relaxed);
                let (batch, _) = data.read(Epoch(0), positions(microbatch), &BTreeSet::new())?;
                samples.fetch_add(batch.samples as u64, Ordering::Relaxed);
                if began.elapsed() >= time / 2 {
                    return Ok(());
                }
            }
        };
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
        readers
            .into_iter()
            .try_for_each(|reader| reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    let rate = samples.into_inner() as f64 / began.elapsed().as_secs_f64();
    Ok(Measured { records: data.len(), opening, steps, rate, threads })
}

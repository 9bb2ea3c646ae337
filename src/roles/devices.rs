//! The workers of one process, each on a device of its own.

use anyhow::{Context as _, Result};
use model::Device;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use worker::Options;

/// Returns the options of the worker of each device. Several workers divide the threads that read
/// data, and have the names of their devices behind the name of the process.
pub(super) fn each(options: &Options, devices: &[Device]) -> Vec<Options> {
    let name = |device: &Device| match devices.len() {
        1 => options.name.clone(),
        _ => format!("{}-{}", options.name, device.to_string().replace(':', "")),
    };
    // The option is that of the process.
    let data_threads = (options.data_threads / devices.len().max(1)).max(1);
    let of =
        |device: &Device| Options { name: name(device), device: *device, data_threads, ..options.clone() };
    devices.iter().map(of).collect()
}

/// Returns the numbers of those devices that are CUDA devices.
pub(super) fn ordinals(devices: &[Device]) -> Vec<usize> {
    let ordinal = |device: &Device| match device {
        Device::Cpu => None,
        Device::Cuda(ordinal) => Some(*ordinal),
    };
    devices.iter().filter_map(ordinal).collect()
}

/// Waits for all workers. When one fails, the others drain: a supervisor that starts the process
/// again gets it with the devices that are left.
///
/// # Errors
/// The error of the first worker that failed.
pub(super) async fn drained(
    mut workers: JoinSet<worker::Result<()>>,
    stop: &CancellationToken,
) -> Result<()> {
    let mut first = Ok(());
    while let Some(ended) = workers.join_next().await {
        let ended = ended.context("a worker panicked").and_then(|ended| Ok(ended?));
        if ended.is_err() {
            stop.cancel();
        }
        first = first.and(ended);
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_workers_of_a_process_are_named_after_their_devices_and_divide_its_data_threads() {
        let options = Options { name: "w".to_owned(), data_threads: 7, ..Options::default() };
        let names = |devices: &[Device]| -> Vec<_> {
            each(&options, devices).into_iter().map(|of| (of.name, of.device, of.data_threads)).collect()
        };
        assert_eq!(names(&[Device::Cuda(1)]), [("w".to_owned(), Device::Cuda(1), 7)]);
        let two = [Device::Cuda(0), Device::Cuda(2)];
        let expected = [("w-cuda0".to_owned(), two[0], 3), ("w-cuda2".to_owned(), two[1], 3)];
        assert_eq!(names(&two), expected);
        let many: Vec<_> = (0..9).map(Device::Cuda).collect();
        assert!(names(&many).iter().all(|(_, _, data_threads)| *data_threads == 1));
    }

    #[test]
    fn only_cuda_devices_have_numbers() {
        assert_eq!(ordinals(&[Device::Cuda(2), Device::Cpu, Device::Cuda(0)]), [2, 0]);
    }

    #[tokio::test]
    async fn the_others_drain_when_one_worker_fails_and_its_error_is_told() {
        let (stop, mut workers) = (CancellationToken::new(), JoinSet::new());
        let error = || worker::Error::Options(vec!["the first".to_owned()]);
        workers.spawn(async move { Err(error()) });
        let drains = stop.clone();
        workers.spawn(async move {
            drains.cancelled().await;
            Ok(())
        });
        let said = drained(workers, &stop).await.unwrap_err().to_string();
        assert!(said.contains("the first"), "{said}");
    }
}

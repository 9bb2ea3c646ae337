//! All metrics of a worker: names, units and meaning in one list.

net::metrics! {
    /// Metrics of one worker.
    microbatches: counter "ebb_worker_microbatches_total", "Microbatches whose gradient was computed.";
    samples: counter "ebb_worker_samples_total", "Records of the microbatches whose gradient was computed.";
    leases: counter "ebb_worker_leases_computed_total", "Training leases that were computed to their end.";
    pulls: counter "ebb_worker_pull_total", "Versions of a job's weights that were pulled from all its ps.";
    pushes: counter "ebb_worker_push_total", "Nodes of the reduction tree that all ps acknowledged.";
    pull_failures: counter "ebb_worker_pull_failed_total", "Calls of a ps for a pull that failed and could be repeated. Waiting for a version is no failure.";
    push_failures: counter "ebb_worker_push_failed_total", "Calls of a ps for a push that failed and could be repeated. A full ps is no failure.";
    load_nanos: seconds "ebb_worker_load_seconds_total", "Time the computation waited for records.";
    pull_nanos: seconds "ebb_worker_pull_seconds_total", "Time the computation waited for weights, whether transfer or barrier.";
    compute_nanos: seconds "ebb_worker_compute_seconds_total", "Time spent computing gradients and reducing them.";
    room_nanos: seconds "ebb_worker_room_seconds_total", "Time the computation waited until a push made room for the next gradient.";
    push_nanos: seconds "ebb_worker_push_seconds_total", "Time from the first gradient of pushes until they were acknowledged; several overlap, also with the computation.";
    push_bytes: counter "ebb_worker_push_bytes_total", "Values of all pushes that every ps acknowledged, in the memory of this worker. What is neither shared nor on a device went through a socket, or to a ps of this process.";
    push_bytes_shared: counter "ebb_worker_push_shared_bytes_total", "Values of pushes that a ps was told to read where they lie in this worker's memory.";
    push_bytes_device: counter "ebb_worker_push_device_bytes_total", "Values of pushes that a ps was told to read where they lie in memory of a CUDA device that this worker has exported.";
    pull_bytes_device: counter "ebb_worker_pull_device_bytes_total", "Values of pulls that a ps copied into memory of a CUDA device that this worker has exported.";
    push_bytes_lost: gauge "ebb_worker_push_lost_bytes", "Shared memory that rests because a ps may still read it after its call broke.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_of_one_form() {
        net::metrics::check_names("worker", &Metrics::default().readings());
    }
}

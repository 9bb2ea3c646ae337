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
    push_nanos: seconds "ebb_worker_push_seconds_total", "Time until pushes were acknowledged; several overlap.";
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

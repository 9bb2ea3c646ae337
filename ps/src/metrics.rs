//! Everything a ps counts: names, units and meaning in one list.

net::metrics! {
    /// The numbers of one ps.
    pushes_merged: counter "ebb_ps_push_merged_total", "Pushes that were added to a step that still lacks others.";
    pushes_completed: counter "ebb_ps_push_completed_total", "Pushes that completed their step, or version 0.";
    pushes_duplicate: counter "ebb_ps_push_duplicate_total", "Pushes that brought nothing new and were dropped.";
    pushes_refused: counter "ebb_ps_push_refused_total", "Pushes that were answered with an error.";
    push_bytes: counter "ebb_ps_push_bytes_total", "Values of all pushes that arrived whole, in the type that they came in.";
    push_bytes_shared: counter "ebb_ps_push_shared_bytes_total", "Values of pushes that were read where they lie in the worker's memory.";
    push_bytes_device: counter "ebb_ps_push_device_bytes_total", "Values of pushes that were read where they lie in memory of this ps's device that the worker has exported.";
    push_bytes_in_flight: gauge "ebb_ps_push_in_flight_bytes", "Values of pushes that are being received or taken up.";
    push_bytes_held: gauge "ebb_ps_push_held_bytes", "Sums of steps in progress that wait for others.";
    pulls: counter "ebb_ps_pull_total", "Pulls that were answered with weights.";
    pulls_refused: counter "ebb_ps_pull_refused_total", "Pulls that were answered with an error, waits that ended included.";
    pull_bytes: counter "ebb_ps_pull_bytes_total", "Values of all pulls that were answered with weights, in the type that they were sent in.";
    pull_bytes_shared: counter "ebb_ps_pull_shared_bytes_total", "Values of pulls that the worker could read where they lie.";
    pull_bytes_device: counter "ebb_ps_pull_device_bytes_total", "Values of pulls that were copied into memory of this ps's device that the worker has exported.";
    pulls_waiting: gauge "ebb_ps_pull_waiting", "Pulls that wait for a version.";
    updates: counter "ebb_ps_update_total", "Steps applied, over all partitions.";
    overflows: counter "ebb_ps_overflow_total", "Steps applied that changed no weight, because the gradient overflowed.";
    update_nanos: seconds "ebb_ps_update_seconds_total", "Time spent applying steps.";
    saves: counter "ebb_ps_save_total", "Partitions' files of checkpoints that were written.";
    saves_failed: counter "ebb_ps_save_failed_total", "Files of checkpoints that were skipped or could not be written.";
    save_bytes: counter "ebb_ps_save_bytes_total", "Sizes of the files of checkpoints that were written.";
    partitions: gauge "ebb_ps_partitions", "Partitions that are open.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_of_one_form() {
        net::metrics::check_names("ps", &Metrics::default().readings());
    }
}

//! `ebb predict`: writes the outputs of a model for the records of a job.

use anyhow::Result;
use proto::spec::Purpose;

use crate::app::App;
use crate::args;
use crate::verbs::measure::{measure, place};

/// # Errors
/// The job file is wrong, the weights do not fit, the predictions exist, or the master does not
/// answer or refuses the job.
pub(crate) async fn run(args: args::Predict, app: &App) -> Result<bool> {
    let place = place(args.on, &args.out, args.join_bytes_max)?;
    measure(args.measure, Purpose::Predict, Some(place), std::future::ready(Ok(None)), app).await
}

#[cfg(test)]
mod tests {
    use proto::spec::{DataSet, JobSpec};

    use super::*;
    use crate::fake::{Fake, measure_args};

    fn args(dir: &std::path::Path, out: &str) -> args::Predict {
        let measure = measure_args(dir, "seed=1");
        let out = dir.join(out).display().to_string();
        args::Predict { measure, out, on: args::On::Train, join_bytes_max: Some(7) }
    }

    #[tokio::test]
    async fn a_master_gets_the_job_with_the_place_of_the_predictions() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let app = fake.app();
        assert!(run(args(dir.path(), "p.npy"), &app).await.unwrap(), "{}", app.said());
        let spec = JobSpec::from_json(&fake.script().submitted[0]).unwrap();
        let predict = spec.predict.unwrap();
        assert_eq!((spec.purpose, predict.on, predict.join_bytes_max), (Purpose::Predict, DataSet::Train, 7));
        assert_eq!(predict.url, dir.path().join("p.npy").display().to_string());
    }

    #[tokio::test]
    async fn predictions_that_exist_or_have_no_format_are_refused_before_anything_is_sent() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        std::fs::write(dir.path().join("p.npy"), "x").unwrap();
        for (out, part) in [("p.npy", "exists; choose another file"), ("p.csv", "must end in one of .jsonl")]
        {
            let error = run(args(dir.path(), out), &fake.app()).await.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(fake.script().submitted.is_empty());
    }
}

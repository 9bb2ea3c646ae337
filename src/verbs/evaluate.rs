//! `ebb evaluate`: measures a model on the validation records of a job.

use anyhow::{Result, bail};
use client::report::MODEL;
use proto::spec::Purpose;

use crate::app::App;
use crate::args;
use crate::verbs::measure::measure;

/// # Errors
/// The job file is wrong, the weights do not fit, the folder cannot be written, or the master does
/// not answer or refuses the job.
pub(crate) async fn run(args: args::Evaluate, app: &App) -> Result<bool> {
    if let Some(dir) = args.out.as_deref().filter(|dir| dir.join(MODEL).exists()) {
        bail!(
            "--out {}: has a trained model, which an evaluation would set aside; choose another folder",
            dir.display()
        );
    }
    let out = super::results(args.out.as_deref(), &args.upload, false, app);
    measure(args.measure, Purpose::Evaluate, None, out, app).await
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proto::spec::JobSpec;

    use super::*;
    use crate::fake::{Fake, measure_args};

    #[tokio::test]
    async fn a_master_gets_the_job_with_its_purpose_and_the_numbers_are_written() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let (app, out) = (fake.app(), dir.path().join("out"));
        let measure = measure_args(dir.path(), "data.validation_fraction=0.5");
        assert!(
            run(args::Evaluate { measure, out: Some(out.clone()), upload: args::Upload::default() }, &app)
                .await
                .unwrap(),
            "{}",
            app.said()
        );
        let spec = JobSpec::from_json(&fake.script().submitted[0]).unwrap();
        assert_eq!((spec.purpose, spec.model.initial.is_some()), (Purpose::Evaluate, true));
        assert!(out.join("summary.json").exists() && out.join("metrics.jsonl").exists());
    }

    #[tokio::test]
    async fn a_device_that_is_not_there_is_named_before_the_folder_is_made() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        std::fs::write(dir.path().join("line.csv"), "x,y\n1,2\n2,3\n").unwrap();
        let mut measure = measure_args(dir.path(), "data.validation_fraction=0.5");
        measure.reach.master.url = None;
        measure.compute.device = "cuda:4095".parse().unwrap();
        let out = dir.path().join("out");
        let args = args::Evaluate { measure, out: Some(out.clone()), upload: args::Upload::default() };
        let error = run(args, &fake.app()).await.unwrap_err().to_string();
        assert!(error.contains("cuda:4095"), "{error}");
        assert!(!out.exists());
    }

    #[tokio::test]
    async fn a_trained_model_stays_where_it_is() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        std::fs::write(dir.path().join(MODEL), "weights").unwrap();
        std::fs::write(dir.path().join("metrics.jsonl"), "").unwrap();
        let measure = measure_args(dir.path(), "data.validation_fraction=0.5");
        let out = Some(dir.path().to_owned());
        let error = run(args::Evaluate { measure, out, upload: args::Upload::default() }, &fake.app())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains("has a trained model") && dir.path().join(MODEL).exists(), "{error}");
    }

    #[tokio::test]
    async fn without_validation_records_nothing_is_sent() {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
        let measure = measure_args(dir.path(), "seed=1");
        let error = run(args::Evaluate { measure, out: None, upload: args::Upload::default() }, &fake.app())
            .await
            .unwrap_err();
        assert!(error.to_string().contains("data.validation: the job has no validation records"), "{error}");
        assert!(fake.script().submitted.is_empty());
        let mut measure = measure_args(dir.path(), "data.validation_fraction=0.5");
        measure.model = Path::new("no/such/model").display().to_string();
        let error = run(args::Evaluate { measure, out: None, upload: args::Upload::default() }, &fake.app())
            .await
            .unwrap_err();
        assert!(error.to_string().contains("no/such/model"), "{error}");
    }
}

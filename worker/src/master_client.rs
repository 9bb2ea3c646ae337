//! The master from a worker's view: every call is named and retried, and errors name its receiver.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use net::session::AsMember;
use proto::convert;
use proto::ids::{IncarnationId, JobId, LeaseId, PartitionId};
use proto::pb;
use proto::pb::fleet_client::FleetClient;
use proto::retry::Retry;
use proto::status::Failure;

use crate::artifact::{Artifact, Writing};
use crate::error::{Error, Result};

/// Longest wait of one request for work. The worker asks again at once.
const LEASE_WAIT: Duration = Duration::from_secs(20);

/// Client of the master. Clones share the connection.
#[derive(Clone, Debug)]
pub(crate) struct MasterClient {
    fleet: FleetClient<AsMember>,
    url: String,
    seed: u64,
}

impl MasterClient {
    pub(crate) fn new(fleet: FleetClient<AsMember>, url: &str, seed: u64) -> Self {
        Self { fleet, url: url.to_owned(), seed }
    }

    /// Asks for work. Returns `None` if there is none in time.
    pub(crate) async fn lease(&self, incarnation: IncarnationId) -> Result<Option<pb::Lease>> {
        let wait_ms = LEASE_WAIT.as_millis() as u32;
        let request = pb::LeaseRequest { incarnation: incarnation.get(), wait_ms };
        Ok(self.call("lease", |mut fleet| async move { fleet.lease(request).await }).await?.lease)
    }

    /// Asks for a job's description.
    pub(crate) async fn job(&self, job: JobId) -> Result<pb::JobReply> {
        self.call("job", |mut fleet| async move { fleet.job(pb::JobRequest { job: job.get() }).await }).await
    }

    /// Names the model's tensors. Returns the placement, and whether version 0 is not wanted.
    pub(crate) async fn describe(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        tensors: Vec<pb::TensorSpec>,
    ) -> Result<(pb::Placement, bool)> {
        let request = pb::DescribeRequest { incarnation: incarnation.get(), lease: lease.get(), tensors };
        let reply = self
            .call("describe", |mut fleet| {
                let request = request.clone();
                async move { fleet.describe(request).await }
            })
            .await?;
        let placement = convert::required("DescribeReply", "placement", reply.placement);
        let placement = placement.map_err(|error| self.error("describe", error.into()))?;
        Ok((placement, reply.restoring))
    }

    /// Reports a finished task, and what this worker noticed in the job's records. The answer says
    /// whether the lease was still valid, and may bring the next work.
    pub(crate) async fn complete(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        result: pb::complete_request::Result,
        warning: Option<String>,
    ) -> Result<pb::CompleteReply> {
        let (incarnation, lease, warning) = (incarnation.get(), lease.get(), warning.unwrap_or_default());
        let request = pb::CompleteRequest { incarnation, lease, result: Some(result), more: true, warning };
        let reply = self.call("complete", |mut fleet| {
            let request = request.clone();
            async move { fleet.complete(request).await }
        });
        reply.await
    }

    /// Asks to skip bad records. Returns when no restart of the master can forget its answer.
    pub(crate) async fn skip(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        set: pb::DataSet,
        records: Vec<pb::BadRecord>,
    ) -> Result<()> {
        let (incarnation, lease) = (incarnation.get(), lease.get());
        let request = pb::SkipRequest { incarnation, lease, set: set.into(), records };
        let reply = self.call("skip", |mut fleet| {
            let request = request.clone();
            async move { fleet.skip(request).await }
        });
        reply.await.map(drop)
    }

    /// Reports a failed task.
    pub(crate) async fn fail(&self, incarnation: IncarnationId, lease: LeaseId, error: &Error) -> Result<()> {
        let diverged_at = match error {
            Error::Diverged { step, .. } => Some(*step),
            _ => None,
        };
        let request = pb::FailRequest {
            incarnation: incarnation.get(),
            lease: lease.get(),
            message: error.to_string(),
            fatal: error.is_fatal(),
            diverged_at,
        };
        let reply = self.call("fail", |mut fleet| {
            let request = request.clone();
            async move { fleet.fail(request).await }
        });
        reply.await.map(drop)
    }

    /// Gives back the rest of a lease.
    pub(crate) async fn release(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        done: Vec<pb::MicrobatchReport>,
    ) -> Result<()> {
        let (incarnation, lease) = (incarnation.get(), lease.get());
        let trained = Some(pb::Trained { microbatches: done, ..pb::Trained::default() });
        self.release_as(pb::ReleaseRequest { incarnation, lease, trained, not_held: None }).await
    }

    /// Gives back a lease because the ps of this partition does not hold the partition.
    pub(crate) async fn release_not_held(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        partition: PartitionId,
    ) -> Result<()> {
        let (incarnation, lease, not_held) = (incarnation.get(), lease.get(), Some(partition.get()));
        let trained = Some(pb::Trained::default());
        self.release_as(pb::ReleaseRequest { incarnation, lease, trained, not_held }).await
    }

    async fn release_as(&self, request: pb::ReleaseRequest) -> Result<()> {
        let reply = self.call("release", |mut fleet| {
            let request = request.clone();
            async move { fleet.release(request).await }
        });
        reply.await.map(drop)
    }

    /// Downloads a job's file into the file system of `folder`, and checks its SHA-256.
    pub(crate) async fn download(
        &self,
        job: JobId,
        artifact: &pb::Artifact,
        folder: &Path,
    ) -> Result<Artifact> {
        let what = format!("download `{}`", artifact.name);
        convert::artifact_name(&artifact.name).map_err(|error| self.error(&what, error.into()))?;
        let file_error = |source| Error::File { path: folder.to_owned(), source };
        let request = pb::DownloadRequest { job: job.get(), name: artifact.name.clone() };
        let mut stream = self
            .call(&what, |mut fleet| {
                let request = request.clone();
                async move { fleet.download(request).await }
            })
            .await?;
        let mut writing = Writing::begin(folder).map_err(file_error)?;
        while let Some(part) = stream.message().await.map_err(|status| self.error(&what, status.into()))? {
            if let Some(pb::artifact_part::Part::Content(content)) = part.part {
                writing.put(&content).await.map_err(file_error)?;
            }
        }
        let (file, found) = writing.finish().await.map_err(file_error)?;
        if found != artifact.sha256 {
            let reason =
                format!("SHA-256 {found} arrived, {} was submitted; the transfer broke off", artifact.sha256);
            return Err(Error::Task { what, reason });
        }
        Ok(file)
    }

    /// Sends the files of an export. Returns their descriptions for the report.
    pub(crate) async fn upload(
        &self,
        incarnation: IncarnationId,
        lease: LeaseId,
        files: BTreeMap<String, bytes::Bytes>,
    ) -> Result<Vec<pb::Artifact>> {
        use pb::artifact_part::Part;
        let header = pb::UploadHeader { incarnation: incarnation.get(), lease: lease.get() };
        let artifacts: Vec<_> =
            files.iter().map(|(name, content)| proto::artifact::describe(name, content)).collect();
        let parts = || {
            let artifact = |part| pb::UploadRequest {
                part: Some(pb::upload_request::Part::Artifact(pb::ArtifactPart { part: Some(part) })),
            };
            let mut list = vec![pb::UploadRequest { part: Some(pb::upload_request::Part::Header(header)) }];
            for (description, content) in artifacts.iter().zip(files.values()) {
                list.push(artifact(Part::Header(description.clone())));
                list.extend(proto::artifact::slices(content).map(|slice| artifact(Part::Content(slice))));
            }
            tokio_stream::iter(list)
        };
        self.call("upload", |mut fleet| {
            let parts = parts();
            async move { fleet.upload(parts).await }
        })
        .await?;
        Ok(artifacts)
    }

    async fn call<T, Fut>(&self, what: &str, call: impl Fn(FleetClient<AsMember>) -> Fut) -> Result<T>
    where
        Fut: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let visible = |attempt: u32, failure: &Failure| {
            if attempt == 1 {
                tracing::warn!(reason = %failure, "{what}: master {} does not answer; trying again", self.url);
            }
        };
        let attempt = || {
            let answer = call(self.fleet.clone());
            async move { Ok(answer.await?.into_inner()) }
        };
        let reply = net::retry::repeat(Retry::unlimited(), self.seed, visible, attempt).await;
        reply.map_err(|failure| self.error(what, failure))
    }

    fn error(&self, what: &str, failure: Failure) -> Error {
        Error::Call { what: format!("{what} (master {})", self.url), failure }
    }
}

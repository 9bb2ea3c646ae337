//! The files of a job that ended, from the master to a place that takes them. Each is compared with
//! the hash that the master announced.

use net::failover::Failover;
use proto::artifact;
use proto::pb;
use proto::pb::artifact_part::Part;
use proto::pb::jobs_client::JobsClient;
use proto::status::Failure;
use sha2::{Digest, Sha256};

use crate::{Error, JobStatus, Result, failure};

/// A destination of the files of a job.
pub(crate) trait Place {
    /// A file on its way.
    type File;

    /// Begins a file. `None`: it is not wanted.
    fn start(&self, name: &str) -> Result<Option<Self::File>>;

    /// Appends to a file.
    fn write(file: &mut Self::File, content: &[u8]) -> Result<()>;
}

/// Keeps some files in memory: those whose names are `wanted`.
pub(crate) struct Memory<F> {
    pub(crate) wanted: F,
}

impl<F: Fn(&str) -> bool> Place for Memory<F> {
    type File = Vec<u8>;

    fn start(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok((self.wanted)(name).then(Vec::new))
    }

    fn write(file: &mut Vec<u8>, content: &[u8]) -> Result<()> {
        file.extend_from_slice(content);
        Ok(())
    }
}

/// Receives the files of a job: name and content of each that `place` wants, once all of them
/// arrived. An outer failure is one of the connection and worth another attempt.
pub(crate) async fn download<P: Place>(
    mut jobs: JobsClient<Failover>,
    status: &JobStatus,
    place: &P,
) -> Result<Result<Vec<(String, P::File)>>, Failure> {
    let request = pb::FetchRequest { job: status.name.clone() };
    let mut stream = jobs.fetch(request).await.map_err(failure)?.into_inner();
    let mut files = Files { begun: Vec::new(), arrived: Vec::new(), current: None };
    while let Some(message) = stream.message().await.map_err(failure)? {
        let step = match message.part {
            Some(Part::Header(header)) => files.begin(place, header),
            Some(Part::Content(content)) => {
                files.current.as_mut().map_or(Ok(()), |file: &mut Current<P>| file.write(&content))
            }
            None => Ok(()),
        };
        if let Err(error) = step {
            return Ok(Err(error));
        }
    }
    Ok(files.end(status))
}

/// The files that have come so far.
struct Files<P: Place> {
    /// Names of all files that have begun.
    begun: Vec<String>,
    arrived: Vec<(String, P::File)>,
    current: Option<Current<P>>,
}

/// The file that is arriving.
struct Current<P: Place> {
    expected: pb::Artifact,
    file: Option<P::File>,
    size: u64,
    hash: Sha256,
}

impl<P: Place> Files<P> {
    fn begin(&mut self, place: &P, expected: pb::Artifact) -> Result<()> {
        self.finish_current()?;
        self.begun.push(expected.name.clone());
        proto::convert::artifact_name(&expected.name)?;
        let file = place.start(&expected.name)?;
        self.current = Some(Current { expected, file, size: 0, hash: Sha256::new() });
        Ok(())
    }

    fn finish_current(&mut self) -> Result<()> {
        if let Some(current) = self.current.take() {
            self.arrived.extend(current.finish()?);
        }
        Ok(())
    }

    fn end(mut self, status: &JobStatus) -> Result<Vec<(String, P::File)>> {
        self.finish_current()?;
        match status.artifacts.iter().find(|artifact| !self.begun.contains(&artifact.name)) {
            Some(artifact) => Err(Error::NotSent { name: artifact.name.clone() }),
            None => Ok(self.arrived),
        }
    }
}

impl<P: Place> Current<P> {
    fn write(&mut self, content: &[u8]) -> Result<()> {
        self.size += content.len() as u64;
        self.hash.update(content);
        self.file.as_mut().map_or(Ok(()), |file| P::write(file, content))
    }

    fn finish(self) -> Result<Option<(String, P::File)>> {
        let Self { expected, file, size, hash } = self;
        let (name, sha256) = (expected.name.clone(), artifact::hex(&hash.finalize()));
        if (size, &sha256) != (expected.size, &expected.sha256) {
            return Err(Error::Arrived { name, size, sha256, expected: Box::new(expected) });
        }
        Ok(file.map(|file| (name, file)))
    }
}

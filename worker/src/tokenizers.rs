//! Tokenizers of a job: files that came with it, read before its records are.

use std::sync::Arc;

use data::Tokenizer;
use proto::artifact;
use proto::ids::JobId;
use proto::pb::{self, Phase};
use proto::spec::JobSpec;

use crate::blocking::blocking;
use crate::config::Options;
use crate::error::{Error, Result};
use crate::master_client::MasterClient;
use crate::progress::Progress;

/// Reads the tokenizers of a job's transforms, from the master unless this process has them. It
/// keeps them as long as the result lives.
///
/// # Errors
/// A file did not come with the job, is no tokenizer, or cannot be fetched.
pub(crate) async fn load(
    id: JobId,
    spec: &JobSpec,
    reply: &pb::JobReply,
    options: &Options,
    master: &MasterClient,
    progress: &Progress,
) -> Result<Vec<Arc<Tokenizer>>> {
    let mut all = Vec::new();
    for sha256 in spec.data.tokenizers() {
        if let Some(known) = Tokenizer::known(sha256) {
            all.push(known);
            continue;
        }
        let name = artifact::tokenizer(sha256);
        let wrong = |reason: String| Error::Impossible { what: format!("tokenizer `{name}`"), reason };
        let given = reply.artifacts.iter().find(|given| given.name == name && given.sha256 == sha256);
        let given =
            given.ok_or_else(|| wrong("it did not come with the job; submit the job anew".to_owned()))?;
        progress.enter(Phase::Opening, format!("download of `{name}`"));
        let file = master.download(id, given, &options.scratch).await?;
        let path = file.path();
        let read = move || -> Result<_> {
            let content = std::fs::read(&path).map_err(|source| Error::File { path, source })?;
            Ok(Tokenizer::read(&content))
        };
        all.push(blocking(options.inline.as_ref(), read).await?.map_err(wrong)?);
        drop(file);
    }
    Ok(all)
}

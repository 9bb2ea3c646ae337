//! `ebb checkpoint`: lists the checkpoints on a store, verifies them, and exports their weights.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use client::results::write_whole;
use proto::artifact;
use proto::checkpoint::manifest::{Manifest, Script};
use proto::checkpoint::{Error, folder_name};
use proto::ids::{PartitionId, Version};
use proto::tensor::Values;
use serde_json::json;
use store::Folder;
use store::data_file::{DataFile, weights};
use store::found::Found;

use crate::app::App;
use crate::args;
use crate::terminal::report::count;

/// # Errors
/// There are no checkpoints, the store cannot be read, or (export) the checkpoint is damaged.
pub(crate) async fn run(verb: args::Checkpoint, app: &App) -> Result<bool> {
    match verb {
        args::Checkpoint::List(args) => list(&args, app).await,
        args::Checkpoint::Verify(args) => verify(&args, app).await,
        args::Checkpoint::Export(args) => export(&args, app).await,
    }
}

async fn list(args: &args::CheckpointList, app: &App) -> Result<bool> {
    let (folder, found) = look(&args.place, app).await?;
    for (version, manifest) in &found.manifests {
        let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
        app.screen.print(&match args.json {
            true => json!({
                "version": version, "epoch": manifest.plan.epochs_before(*version), "steps": manifest.plan.steps(),
                "partitions": manifest.files.len(), "bytes": bytes, "created_unix_secs": manifest.created_unix_secs,
                "run": manifest.run, "folder": folder.shown(&folder_name(*version)),
            })
            .to_string(),
            false => format!(
                "version {version} of {}, epoch {} of {}: {} in {}, {bytes} bytes",
                manifest.plan.steps(),
                manifest.plan.epochs_before(*version).get() + 1,
                manifest.plan.epochs,
                manifest.job,
                count(manifest.files.len() as u64, "partition", "partitions"),
            ),
        })?;
    }
    for (version, error) in &found.damaged {
        app.screen.print(&match args.json {
            true => json!({ "version": version, "error": error.to_string() }).to_string(),
            false => format!("version {version}: {error}"),
        })?;
    }
    Ok(true)
}

async fn verify(args: &args::CheckpointVerify, app: &App) -> Result<bool> {
    let (folder, found) = look(&args.place, app).await?;
    let versions = found.manifests.keys().chain(found.damaged.keys()).copied();
    let wanted = |version: &Version| args.version.is_none_or(|wanted| wanted == version.get());
    let mut versions: Vec<_> = versions.filter(wanted).collect();
    versions.sort_unstable();
    if let (Some(version), []) = (args.version, &versions[..]) {
        bail!("{folder} has no checkpoint of version {version}; it has {}", names(&found));
    }
    let mut intact = true;
    for version in versions {
        let checked = match (found.manifests.get(&version), found.damaged.get(&version)) {
            (Some(manifest), _) => read_all(&folder.below(&folder_name(version)), manifest).await,
            (None, Some(error)) => Err(error.clone()),
            (None, None) => continue,
        };
        intact &= checked.is_ok();
        app.screen.print(&match (args.json, &checked) {
            (true, checked) => {
                let error = checked.as_ref().err().map(ToString::to_string);
                json!({ "version": version, "intact": error.is_none(), "error": error }).to_string()
            }
            (false, Ok(bytes)) => format!("version {version}: intact ({bytes} bytes)"),
            (false, Err(error)) => format!("version {version}: {error}"),
        })?;
    }
    Ok(intact)
}

/// Compares every byte with its checksum. Returns the number of bytes.
async fn read_all(folder: &Folder, manifest: &Manifest) -> proto::checkpoint::Result<u64> {
    for partition in (0..manifest.files.len() as u32).map(PartitionId) {
        DataFile::open(folder, manifest, partition).await?.verify().await?;
    }
    Ok(manifest.files.iter().map(|file| file.bytes).sum())
}

async fn export(args: &args::CheckpointExport, app: &App) -> Result<bool> {
    let (dir, name, beside) = targets(&args.out)?;
    let (folder, manifest, values) = read(args, app).await?;
    let module = match &manifest.script {
        Some(script) => {
            let module = read_script(&folder, script).await?;
            refuse_to_replace(&args.out.with_extension(MODULE), script)?;
            // With libtorch this computes; nothing else is to be done meanwhile.
            match model::engines::script_with_weights(module.path(), &manifest.tensors, &values) {
                Err(missing @ model::Error::NoTorch(_)) => {
                    app.screen.line(&format!(
                        "note: the job has a TorchScript module, and {beside} is not written, nor are in {name} the tensors of the module \
                         that training never changes: {missing}"
                    ));
                    None
                }
                done => Some(done?),
            }
        }
        None => None,
    };
    let constants = module.as_ref().map(|(_, constants)| &constants[..]).unwrap_or_default();
    write_whole(dir, name, &model::export::safetensors(&manifest.tensors, &values, constants)?)?;
    let tensors = count(manifest.tensors.len() as u64, "tensor", "tensors");
    let (version, job) = (manifest.version, &manifest.job);
    app.screen.print(&format!("{}: {tensors} of version {version} of {job}", args.out.display()))?;
    if let Some((module, _)) = &module {
        write_whole(dir, &beside, module)?;
        app.screen.print(&format!("{}: the TorchScript module with them", dir.join(&beside).display()))?;
    }
    Ok(true)
}

/// Largest number of newest checkpoints that are tried, if each is superseded while it is read.
const NEWEST_TRIED_MAX: usize = 10;

/// The file ending of a TorchScript module.
const MODULE: &str = "pt";

/// Folder and name of the weights' file, and the name of the module's file beside it.
fn targets(out: &Path) -> Result<(&Path, &str, String)> {
    let name = out.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("--out {}: is no name of a file", out.display()))?;
    let beside = Path::new(name).with_extension(MODULE);
    if beside == Path::new(name) {
        bail!(
            "--out {name}: is for weights as safetensors; end it with .safetensors, a TorchScript module goes beside it"
        );
    }
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((dir, name, beside.display().to_string()))
}

/// Reads the weights of a checkpoint. The job may go on meanwhile: if the newest checkpoint is
/// removed while it is read, a newer one is read instead.
async fn read(args: &args::CheckpointExport, app: &App) -> Result<(Folder, Manifest, Vec<Values>)> {
    let mut tried = Vec::new();
    loop {
        let (folder, mut found) = look(&args.place, app).await?;
        let newest = found.manifests.keys().next_back().copied();
        let Some(version) = args.version.map(Version).or(newest) else {
            bail!(
                "{folder} has no intact checkpoint; `checkpoint verify` says what is wrong with those that it has"
            );
        };
        let Some(manifest) = found.manifests.remove(&version) else {
            match found.damaged.remove(&version) {
                Some(error) => return Err(error.into()),
                None => bail!("{folder} has no checkpoint of version {version}; it has {}", names(&found)),
            }
        };
        match weights(&folder.below(&folder_name(version)), &manifest).await {
            Err(Error::Missing { .. })
                if args.version.is_none() && !tried.contains(&version) && tried.len() < NEWEST_TRIED_MAX =>
            {
                tried.push(version);
            }
            values => return Ok((folder, manifest, values?)),
        }
    }
}

/// Copies the job's module into a temporary file, which its drop removes.
async fn read_script(folder: &Folder, script: &Script) -> Result<tempfile::NamedTempFile> {
    let name = script.file_name();
    let content = folder.read(&name, script.bytes).await?;
    let found = artifact::sha256_hex(&content);
    if found != script.sha256 {
        let what = format!("its SHA-256 is {found}, expected {}", script.sha256);
        return Err(Error::Damaged { file: folder.shown(&name), what }.into());
    }
    let mut file = tempfile::NamedTempFile::new().context("a temporary file for the TorchScript module")?;
    file.write_all(&content).context("a temporary file for the TorchScript module")?;
    Ok(file)
}

/// Refuses to replace the module that the job was submitted with, which is the user's own. Another
/// module may be replaced.
///
/// # Errors
/// The file at `path` is the user's own.
fn refuse_to_replace(path: &Path, script: &Script) -> Result<()> {
    let Ok(content) = std::fs::read(path) else { return Ok(()) };
    if artifact::sha256_hex(&content) == script.sha256 {
        bail!(
            "{}: is the TorchScript module that the job was submitted with, and would be replaced by the trained one; choose another \
             folder or name with --out",
            path.display()
        );
    }
    Ok(())
}

/// Returns the folder of one job, and its checkpoints.
async fn look(place: &args::CheckpointPlace, app: &App) -> Result<(Folder, Found)> {
    Ok(client::checkpoint::look(&app.environment.stores, &url(place, app).await?).await?)
}

async fn url(place: &args::CheckpointPlace, app: &App) -> Result<String> {
    let (Some(job), None) = (&place.job, &place.folder) else {
        return Ok(place.folder.clone().unwrap_or_default());
    };
    let status = app.client(&place.reach)?.status(job).await?;
    if status.checkpoints.is_empty() {
        bail!("{} has no checkpoints: its job file has no [checkpoint] section", status.name);
    }
    Ok(status.checkpoints)
}

fn names(found: &Found) -> String {
    found.manifests.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

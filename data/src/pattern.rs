//! Patterns such as `part-*.parquet` in the lists of a job's files.
//!
//! The program that submits a job replaces a pattern by the files that fit it, once. So the job has
//! a list that never changes, and the numbering of its records neither.

use std::path::Path;

use proto::spec::{DataSpec, FilesSpec, Format, data_url};

use crate::error::{Error, Result, wrong};
use crate::remote;

/// Returns the section with a list of files in place of each pattern, sorted by name. Local paths
/// are looked up below `root` if given. The call blocks.
///
/// # Errors
/// A folder cannot be listed, or no file fits a pattern.
pub fn without_patterns(data: &DataSpec, root: Option<&Path>) -> Result<DataSpec> {
    let mut replaced = data.clone();
    let validation = replaced.validation.iter_mut().chain(replaced.validation_sets.values_mut());
    for files in std::iter::once(&mut replaced.train).chain(validation) {
        replace(files, data, root)?;
    }
    Ok(replaced)
}

fn replace(files: &mut FilesSpec, data: &DataSpec, root: Option<&Path>) -> Result<()> {
    for list in files.lists.values_mut().filter(|list| list.iter().any(|name| data_url::is_pattern(name))) {
        let mut names = Vec::with_capacity(list.len());
        for name in list.drain(..) {
            match data_url::is_pattern(&name) {
                true => names.extend(fitting(&name, data, root)?),
                false => names.push(name),
            }
        }
        *list = names;
    }
    Ok(())
}

/// Returns the names that fit a pattern, sorted, with the folder of the pattern before them.
fn fitting(pattern: &str, data: &DataSpec, root: Option<&Path>) -> Result<Vec<String>> {
    let (folder, last) = data_url::last_part(pattern);
    let is_url = data_url::split(pattern).is_some();
    let last = if is_url { data_url::decoded(last) } else { last.into() };
    let wants_folders = data.format == Format::Images;
    let mut found = match data_url::is_remote(pattern) {
        true => remote::list(folder, wants_folders)?,
        false => local(&data.locate(folder, root), wants_folders)?,
    };
    found.retain(|name| data_url::fits(&last, name));
    if found.is_empty() {
        return wrong(
            Path::new(pattern),
            "no file fits this pattern. The program that submits the job looks for the files: if only the workers see \
             them, name each file",
        );
    }
    found.sort();
    let name = |name: String| if is_url { data_url::encoded(&name) } else { name };
    Ok(found.into_iter().map(|found| format!("{folder}{}", name(found))).collect())
}

/// Returns the names of the files in a local folder, or of its folders.
fn local(folder: &Path, wants_folders: bool) -> Result<Vec<String>> {
    // Without a folder before it a pattern stands for files of the working directory.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let failed = |source| Error::File { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in folder.read_dir().map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() != wants_folders {
            continue;
        }
        match path.file_name().and_then(|name| name.to_str()) {
            Some(name) => names.push(name.to_owned()),
            None => return wrong(&path, "a name that is no UTF-8; rename it"),
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(folder: &Path, files: &[&str]) -> DataSpec {
        let list = files.iter().map(|&name| name.to_owned()).collect();
        let files = FilesSpec { lists: [("files".to_owned(), list)].into(), ..FilesSpec::default() };
        DataSpec { base: Some(folder.to_owned()), ..DataSpec::of(Format::Csv, files) }
    }

    fn names(data: &DataSpec, root: Option<&Path>) -> Result<Vec<String>> {
        Ok(without_patterns(data, root)?.train.lists.remove("files").unwrap_or_default())
    }

    #[test]
    fn a_pattern_becomes_the_files_that_fit_it_sorted_by_name() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("d/part-3.csv")).unwrap();
        for name in ["d/part-10.csv", "d/part-2.csv", "d/.part-1.csv", "d/part-2.csv.gz", "a b.csv"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let of = |files: &[&str]| names(&data(folder.path(), files), None);
        assert_eq!(
            of(&["x.csv", "d/part-*.csv", "y.csv"]).unwrap(),
            ["x.csv", "d/part-10.csv", "d/part-2.csv", "y.csv"]
        );
        assert_eq!(of(&["*.csv"]).unwrap(), ["a b.csv"]);
        let base = folder.path().display().to_string();
        assert_eq!(of(&[&format!("file://{base}/*.csv")]).unwrap(), [format!("file://{base}/a%20b.csv")]);
        assert_eq!(of(&[&format!("{base}/d/*.gz")]).unwrap(), [format!("{base}/d/part-2.csv.gz")]);
        assert_eq!(
            names(&data(Path::new("/nowhere"), &["/d/*.gz"]), Some(folder.path())).unwrap(),
            ["/d/part-2.csv.gz"]
        );
        let said = of(&["d/*.parquet"]).unwrap_err().to_string();
        assert!(said.contains("d/*.parquet: no file fits this pattern"), "{said}");
        assert!(of(&["nowhere/*"]).unwrap_err().to_string().contains("nowhere"));
    }

    #[test]
    fn folders_of_images_fit_as_folders() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("train-1")).unwrap();
        std::fs::write(folder.path().join("train-2"), "").unwrap();
        let data = DataSpec { format: Format::Images, ..data(folder.path(), &["train-*"]) };
        assert_eq!(names(&data, None).unwrap(), ["train-1"]);
    }
}

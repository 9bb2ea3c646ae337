//! The images of a folder, on a disk or in an object store: which there are, and their bytes.
//!
//! Images lie in subfolders, one for each class, and are sorted by class and path, part by part, by
//! the bytes of the names. So equal files have equal numbers wherever they lie. A folder on a disk
//! is walked, and a folder of an object store is listed by its prefix. The listing gives sizes and
//! ETags, so that an image is read by one request.

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use walkdir::WalkDir;

use crate::error::{Error, Result, malformed, wrong};
use crate::observer::Observer;
use crate::remote::{self, Listed};
use crate::version;

/// Endings of the files that count as images, in lower case.
pub(crate) const ENDINGS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// Images between two calls of an observer.
pub(crate) const OBSERVED: usize = 1024;

/// The images of a folder when it was opened. Folders that are equal had equal images.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The folder in its object store. `None`: it is on a disk.
    remote: Option<remote::Folder>,
    /// Sorted names of the subfolders.
    classes: Vec<String>,
    images: Images,
}

/// Images, by their number.
#[derive(Debug, Default, PartialEq, Eq)]
struct Images {
    /// Paths below the folder.
    names: Texts,
    /// Bytes of each file.
    sizes: Vec<u64>,
    /// ETags of a folder in an object store.
    tags: Texts,
    /// Times of the modification of the files on a disk, in nanoseconds since 1970.
    times: Vec<u64>,
}

/// Texts one after the other, which take less memory than one by one.
#[derive(Debug, Default, PartialEq, Eq)]
struct Texts {
    all: String,
    /// End of each text.
    ends: Vec<usize>,
}

impl Texts {
    fn push(&mut self, text: &str) {
        self.all.push_str(text);
        self.ends.push(self.all.len());
    }

    fn get(&self, at: usize) -> &str {
        let begin = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.all[begin..self.ends[at]]
    }
}

impl PartialEq for Folder {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, &self.classes, &self.images) == (&other.path, &other.classes, &other.images)
    }
}

/// Returns the sorted names of a folder's subfolders. Hidden ones do not count. `folder` may be a
/// URL. The call blocks.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn classes(folder: &Path) -> Result<Vec<String>> {
    let mut names = match remote::url(folder) {
        Some(url) => remote::Folder::open(url)?.subfolders()?,
        None => subfolders(folder)?,
    };
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    Ok(names)
}

/// Returns the names of a folder's subfolders on a disk, without hidden ones.
///
/// A link that leads nowhere is an error: it may stand for a class, and without it other classes
/// would get its number.
fn subfolders(folder: &Path) -> Result<Vec<String>> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::File { path, source }
    };
    let mut names = Vec::new();
    for entry in folder.read_dir().map_err(failed(folder))? {
        let entry = entry.map_err(failed(folder))?;
        let path = entry.path();
        let Ok(name) = entry.file_name().into_string() else {
            return wrong(&path, "a name that is no UTF-8; rename it");
        };
        if !name.starts_with('.') && path.metadata().map_err(failed(&path))?.is_dir() {
            names.push(name);
        }
    }
    Ok(names)
}

/// Returns whether a path below a folder is that of an image in a subfolder.
fn is_image(name: &str) -> bool {
    let ending = Path::new(name).extension().map(|ending| ending.to_string_lossy().to_lowercase());
    name.contains('/') && ending.is_some_and(|ending| ENDINGS.contains(&ending.as_str()))
}

impl Folder {
    /// Finds the images of a folder, and reports the progress to `observer`. `path` may be a URL.
    /// The call blocks.
    ///
    /// # Errors
    /// The folder cannot be read or listed, or has a loop of links.
    pub(crate) fn open(path: &Path, observer: &dyn Observer) -> Result<Self> {
        let classes = classes(path)?;
        let mut images = Images::default();
        let remote = remote::url(path).map(remote::Folder::open).transpose()?;
        match &remote {
            Some(remote) => images.add_listed(remote.files(is_image, observer)?, &classes),
            None => classes.iter().try_for_each(|class| images.add(path, class, observer))?,
        }
        Ok(Self { path: path.to_owned(), remote, classes, images })
    }

    /// Returns the path or URL.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the sorted names of the subfolders, also of those without images.
    pub(crate) fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns the number of images.
    pub(crate) const fn len(&self) -> usize {
        self.images.sizes.len()
    }

    /// Returns the path of an image below the folder. It begins with the image's class.
    pub(crate) fn name(&self, image: usize) -> &str {
        self.images.names.get(image)
    }

    /// Returns the class of an image.
    pub(crate) fn class(&self, image: usize) -> &str {
        self.name(image).split('/').next().unwrap_or_default()
    }

    /// Returns the number of bytes of each image.
    pub(crate) fn sizes(&self) -> &[u64] {
        &self.images.sizes
    }

    /// Returns the text that tells these contents from others of the same names and sizes: the
    /// checksum of the images' ETags, or of the times of their modification on this host. Empty:
    /// there is none.
    pub(crate) fn version(&self) -> String {
        match self.remote {
            Some(_) => format!("{:08x}", crc32c::crc32c(self.images.tags.all.as_bytes())),
            None => {
                let times = self.images.times.iter();
                let sum = times.fold(0, |sum, time| crc32c::crc32c_append(sum, &time.to_le_bytes()));
                version::of_local_state(&format!("{sum:08x}")).unwrap_or_default()
            }
        }
    }

    /// Reads an image, which must be as it was when the folder was opened. The call blocks.
    ///
    /// # Errors
    /// The image has changed or cannot be read.
    pub(crate) fn read(&self, image: usize) -> Result<Vec<u8>> {
        let (name, size) = (self.name(image), self.images.sizes[image]);
        if let Some(remote) = &self.remote {
            return Ok(remote.read(name, size, self.images.tags.get(image))?.into());
        }
        let (path, mut bytes) = (self.path.join(name), Vec::with_capacity(size as usize + 1));
        let mut read = || -> std::io::Result<u64> {
            let file = File::open(&path)?;
            let time = time_of(&file.metadata()?);
            file.take(size + 1).read_to_end(&mut bytes)?;
            Ok(time)
        };
        let time = read().map_err(|source| Error::File { path: path.clone(), source })?;
        if (bytes.len() as u64, time) != (size, self.images.times[image]) {
            return wrong(
                &path,
                format!(
                    "the file has no longer the {size} bytes and the time of modification that it had when this worker \
                     opened the folder; restore it, or submit the job anew"
                ),
            );
        }
        Ok(bytes)
    }
}

/// Returns when a file was modified, in nanoseconds since 1970. 0: its file system does not say.
fn time_of(file: &Metadata) -> u64 {
    let since = file.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// Returns the error of a walk that met no loop. Its own text would name the path again.
fn failed(path: PathBuf, error: walkdir::Error) -> Error {
    Error::File { path, source: error.into_io_error().unwrap_or_else(|| ErrorKind::Other.into()) }
}

impl Images {
    fn push(&mut self, name: &str, bytes: u64) {
        self.names.push(name);
        self.sizes.push(bytes);
    }

    /// Adds the images of a class on a disk, in the order of their paths.
    fn add(&mut self, folder: &Path, class: &str, observer: &dyn Observer) -> Result<()> {
        let walk = WalkDir::new(folder.join(class)).follow_links(true).sort_by_file_name();
        for entry in walk {
            let entry = entry.map_err(|error| {
                let path = error.path().unwrap_or(folder).to_owned();
                match error.loop_ancestor() {
                    Some(ancestor) => malformed(
                        &path,
                        format!("a link to {}, which holds it; remove the link", ancestor.display()),
                    ),
                    None => failed(path, error),
                }
            })?;
            let below = entry.path().strip_prefix(folder).unwrap_or(entry.path());
            if !entry.file_type().is_file() || !is_image(&below.to_string_lossy()) {
                continue;
            }
            let Some(below) = below.to_str() else {
                return wrong(entry.path(), "a name that is no UTF-8; rename it");
            };
            let metadata = entry.metadata().map_err(|error| failed(entry.path().to_owned(), error))?;
            self.push(below, metadata.len());
            self.times.push(time_of(&metadata));
            if self.sizes.len().is_multiple_of(OBSERVED) {
                observer.advance();
            }
        }
        Ok(())
    }

    /// Adds the images of a listing that belong to a class.
    fn add_listed(&mut self, mut files: Vec<Listed>, classes: &[String]) {
        let class = |file: &Listed| file.name.split('/').next().unwrap_or_default().to_owned();
        files.retain(|file| classes.binary_search(&class(file)).is_ok());
        files.sort_by(|one, other| one.name.split('/').cmp(other.name.split('/')));
        for file in files {
            self.push(&file.name, file.bytes);
            self.tags.push(&file.tag);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_files_in_subfolders_with_the_ending_of_an_image_count() {
        for name in ["a/1.jpg", "a/b/1.JPEG", "a/.1.png", "a/é ü%.webp"] {
            assert!(is_image(name), "{name}");
        }
        for name in ["1.jpg", "a/1.gif", "a/jpg", "a/.jpg", "a", "a/b.jpg/c"] {
            assert!(!is_image(name), "{name}");
        }
    }

    #[test]
    fn links_that_lead_nowhere_are_refused_where_a_class_or_an_image_may_be() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("ant")).unwrap();
        std::fs::write(dir.path().join("ant/1.png"), "1").unwrap();
        let (gone, around) =
            ("No such file or directory (os error 2)", "Too many levels of symbolic links (os error 40)");
        for (name, target, cause) in
            [("bee", "gone", gone), ("ant/2.png", "gone", gone), ("cow", "cow", around)]
        {
            let link = dir.path().join(name);
            std::os::unix::fs::symlink(target, &link).unwrap();
            let error = Folder::open(dir.path(), &()).unwrap_err().to_string();
            assert_eq!(error, format!("{}: {cause}", link.display()));
            std::fs::remove_file(link).unwrap();
        }
        // Editors leave such links for a while.
        std::os::unix::fs::symlink("gone", dir.path().join(".#list")).unwrap();
        assert_eq!(Folder::open(dir.path(), &()).unwrap().classes(), ["ant"]);
    }

    #[test]
    fn an_image_that_was_written_anew_with_as_many_bytes_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        let (first, second) = (dir.path().join("a/1.png"), dir.path().join("a/2.png"));
        std::fs::write(&first, "old").unwrap();
        std::fs::write(&second, "old").unwrap();
        let folder = Folder::open(dir.path(), &()).unwrap();
        assert_eq!(folder.read(0).unwrap(), b"old");
        std::fs::write(&first, "new").unwrap();
        let later = first.metadata().unwrap().modified().unwrap() + std::time::Duration::from_secs(5);
        File::options().append(true).open(&first).unwrap().set_modified(later).unwrap();
        let error = folder.read(0).unwrap_err().to_string();
        assert!(error.contains("1.png: the file has no longer the 3 bytes and the time"), "{error}");
        assert_eq!(folder.read(1).unwrap(), b"old");
        let again = Folder::open(dir.path(), &()).unwrap();
        assert!(again != folder && version::difference(&again.version(), &folder.version()).is_some());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_listing_has_the_order_of_a_walk(
            paths in proptest::collection::btree_set("[a-c][-a .0é]{0,2}(/[ab][-.a0]{0,1}){0,2}", 1..20)
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut listed = Vec::new();
            for path in paths {
                let name = format!("{path}.png");
                let place = dir.path().join(&name);
                // A name cannot be both a file's and a folder's on a disk.
                let Ok(()) = std::fs::create_dir_all(place.parent().unwrap()) else { continue };
                if std::fs::write(&place, name.as_bytes()).is_ok() && is_image(&name) {
                    listed.push(Listed { bytes: name.len() as u64, name, tag: String::new() });
                }
            }
            let walked = Folder::open(dir.path(), &()).unwrap();
            let mut images = Images::default();
            listed.reverse();
            images.add_listed(listed, walked.classes());
            images.tags = Texts::default();
            images.times = walked.images.times.clone();
            prop_assert_eq!(images, walked.images);
        }
    }
}

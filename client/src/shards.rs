//! A folder of an object store that gets the shards of a conversion of data files.

use std::path::Path;

use data::ShardStore;
use store::location::Location;
use store::{Folder, Stores};
use tokio::runtime::Handle;

use crate::results::copy_whole;
use crate::{Error, Result};

/// A folder of a store. Its calls block, and must not come from a task of a runtime.
#[derive(Debug)]
pub struct Shards {
    stores: Stores,
    folder: Folder,
    runtime: Handle,
}

impl Shards {
    /// Opens the folder of a URL. It does not access the store. Calls wait for the runtime in which
    /// this one is made.
    ///
    /// # Errors
    /// The URL leads to no store.
    ///
    /// # Panics
    /// If there is no runtime.
    pub fn open(stores: &Stores, url: &str) -> Result<Self> {
        Ok(Self { stores: stores.clone(), folder: stores.open(url)?, runtime: Handle::current() })
    }

    /// Waits for a call about the file `name`.
    fn wait<T>(&self, name: &str, call: impl Future<Output = Result<T>>) -> data::Result<T> {
        let done = self.runtime.block_on(call);
        done.map_err(|error| data::Error::Remote { url: self.folder.shown(name), reason: error.to_string() })
    }
}

impl ShardStore for Shards {
    fn names(&self) -> data::Result<Vec<String>> {
        let list = async { Ok::<_, Error>(self.stores.patiently(|_| {}, || self.folder.list()).await?) };
        self.wait("", list)
    }

    fn remove(&self, name: &str) -> data::Result<()> {
        let remove =
            async { Ok::<_, Error>(self.stores.patiently(|_| {}, || self.folder.remove_file(name)).await?) };
        self.wait(name, remove)
    }

    fn write(&self, name: &str, file: &Path) -> data::Result<()> {
        self.wait(name, copy_whole(&self.stores, &self.folder, file, name))
    }

    fn url(&self, name: &str) -> String {
        self.folder.shown(name)
    }

    fn holds(&self, file: &str) -> bool {
        let place = Location::of(&self.url(""));
        place.is_ok_and(|place| Location::of(file).is_ok_and(|file| place.holds(&file)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::sync::Arc;

    use data::{Conversion, Converted, ShardSize, convert};
    use proto::spec::{DataSpec, FILES, FilesSpec, Format};

    use super::*;

    const URL: &str = "memory://data/shards";

    /// Converts a table of five records to a store, by way of the folder `staging`.
    async fn converted(
        dir: &Path,
        stores: &Stores,
        format: Format,
        overwrite: bool,
    ) -> data::Result<Converted> {
        let table = dir.join("table.csv");
        fs::write(&table, "x,the label\n1,0\n2,1\n3,0\n4,1\n5,0\n").unwrap();
        let lists = BTreeMap::from([(FILES.to_owned(), vec![table.display().to_string()])]);
        let order = Conversion {
            source: DataSpec::of(Format::Csv, FilesSpec { records: None, lists }),
            format,
            folder: dir.join("staging"),
            store: Some(Arc::new(Shards::open(stores, URL).unwrap())),
            size: ShardSize::Records(2),
            shuffle: None,
            threads: 2,
            overwrite,
        };
        let work = tokio::task::spawn_blocking(move || convert(&order, &|_, _| true));
        work.await.unwrap().map(|converted| converted.expect("nobody stops it"))
    }

    async fn names(stores: &Stores) -> Vec<String> {
        let mut names = stores.open(URL).unwrap().list().await.unwrap();
        names.sort();
        names
    }

    #[tokio::test]
    async fn shards_go_to_a_store_as_they_would_to_a_disk() {
        let (dir, stores) = (tempfile::tempdir().unwrap(), Stores::default());
        let first = converted(dir.path(), &stores, Format::Jsonl, false).await.unwrap();
        let files = ["data.toml", "part-00000.jsonl", "part-00001.jsonl", "part-00002.jsonl"];
        assert_eq!(names(&stores).await, files);
        assert_eq!(fs::read_dir(dir.path().join("staging")).unwrap().count(), 0, "nothing stays here");
        let folder = stores.open(URL).unwrap();
        let last = folder.read(files[3], 100).await.unwrap();
        assert_eq!(last, "{\"x\":5.0,\"the label\":0.0}\n");
        assert_eq!(folder.read(files[0], 1000).await.unwrap(), first.section());
        assert_eq!(first.data.train.lists[FILES][2], format!("{URL}/part-00002.jsonl"));

        let said = converted(dir.path(), &stores, Format::Jsonl, false).await.unwrap_err().to_string();
        let expected = "memory://data/shards/: 4 files of an earlier conversion are there";
        assert!(said.contains(expected) && said.contains("--overwrite"), "{said}");
        converted(dir.path(), &stores, Format::Tfrecord, true).await.unwrap();
        assert_eq!(names(&stores).await.iter().filter(|name| name.ends_with(".jsonl")).count(), 0);
    }

    #[tokio::test]
    async fn what_no_conversion_wrote_stays_and_names_that_urls_encode_are_refused() {
        let (dir, stores) = (tempfile::tempdir().unwrap(), Stores::default());
        let said = converted(dir.path(), &stores, Format::Npy, false).await.unwrap_err().to_string();
        assert!(said.contains("a file would be `part-00000.the label.npy`"), "{said}");
        stores.open(URL).unwrap().write("notes.txt", "mine".into()).await.unwrap();
        let said = converted(dir.path(), &stores, Format::Arrow, true).await.unwrap_err().to_string();
        assert!(said.contains("`notes.txt` is there, which no conversion wrote"), "{said}");
        assert_eq!(names(&stores).await, ["notes.txt"]);
    }
}

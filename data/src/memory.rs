//! How much memory this process may use.

use std::path::Path;

/// Returns the memory that this process may use, in bytes: the limit of its control groups, or what
/// the machine has.
pub fn memory_limit() -> u64 {
    let info = rustix::system::sysinfo();
    let machine = info.totalram as u64 * u64::from(info.mem_unit);
    machine.min(group_limit(Path::new("/")))
}

/// Returns the smallest limit of memory of the control groups that hold this process, in bytes.
/// `root`: where the system's files are. Without a limit it returns the largest number.
///
/// A container mostly sees its own group as the root of all groups. Otherwise `/proc/self/cgroup`
/// has the path of the group. The groups around it limit it too.
fn group_limit(root: &Path) -> u64 {
    // The second version has one tree of groups, the first one a tree of groups for memory.
    let trees = [("", "memory.max"), ("memory", "memory.limit_in_bytes")];
    let own = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = trees.iter().flat_map(|(controller, file)| {
        let is_tree = |controllers: &str| controllers.split(',').any(|name| name == *controller);
        let path = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            is_tree(controllers).then_some(path)
        });
        let top = root.join("sys/fs/cgroup").join(controller);
        let path = path.unwrap_or_default().trim_start_matches('/');
        let groups: Vec<_> = Path::new(path).ancestors().map(|group| top.join(group).join(file)).collect();
        groups.into_iter().filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok())
    });
    limits.min().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_the_groups_around_a_process_counts() {
        let write = |root: &Path, files: &[(&str, &str)]| {
            for (name, text) in files {
                let path = root.join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
        };
        let limit = |files: &[(&str, &str)]| {
            let root = tempfile::tempdir().unwrap();
            write(root.path(), files);
            group_limit(root.path())
        };
        assert_eq!(limit(&[]), u64::MAX);
        let own = ("proc/self/cgroup", "0::/jobs.slice/a\n");
        assert_eq!(limit(&[own, ("sys/fs/cgroup/jobs.slice/a/memory.max", "max\n")]), u64::MAX);
        let around = ("sys/fs/cgroup/jobs.slice/memory.max", "4096\n");
        assert_eq!(limit(&[own, ("sys/fs/cgroup/jobs.slice/a/memory.max", "8192\n"), around]), 4096);
        assert_eq!(limit(&[own, around, ("sys/fs/cgroup/jobs.slice/a/memory.max", "2048\n")]), 2048);
        // In a container its own group is the root.
        assert_eq!(limit(&[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "1024\n")]), 1024);
        let own = ("proc/self/cgroup", "9:cpu,cpuacct:/docker/b\n5:memory:/docker/b\n0::/docker/b\n");
        let root = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "512\n");
        assert_eq!(limit(&[own, root]), 512, "the first version, in a container");
        let inner = ("sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes", "256\n");
        assert_eq!(limit(&[own, root, inner]), 256, "the first version, outside");
    }
}

//! Whether systemd-logind removes this user's shared memory at logout.

use std::path::Path;

/// logind's settings, later files overriding earlier ones.
const FILES: [&str; 3] = ["usr/lib/systemd/logind.conf", "run/systemd/logind.conf", "etc/systemd/logind.conf"];
const DIRECTORIES: [&str; 3] =
    ["usr/lib/systemd/logind.conf.d", "run/systemd/logind.conf.d", "etc/systemd/logind.conf.d"];
/// Lower numbers are system users, whose shared memory is kept.
const FIRST_USER: u32 = 1000;

/// Returns a warning if logind may remove `memory` of this user. `root` is the root of the file
/// system to inspect.
pub fn warning(root: &Path, uid: u32, user: &str, memory: &Path) -> Option<String> {
    let runs = root.join("run/systemd/seats").exists() || root.join("run/systemd/users").exists();
    let lingers = root.join("var/lib/systemd/linger").join(user).exists();
    if !runs || uid < FIRST_USER || lingers || !memory.starts_with("/dev/shm") || !removes(root) {
        return None;
    }
    Some(format!(
        "systemd-logind removes {} when {user} logs out (RemoveIPC), also while a job runs; run: loginctl enable-linger {user}, or set \
         RemoveIPC=no in /etc/systemd/logind.conf, or EVERSTEP_SHM_DIR to another tmpfs",
        memory.display()
    ))
}

/// Returns whether removal is on, which is the default.
fn removes(root: &Path) -> bool {
    let mut files: Vec<_> = FILES.iter().map(|f| root.join(f)).collect();
    for directory in DIRECTORIES {
        let entries = std::fs::read_dir(root.join(directory)).into_iter().flatten().flatten();
        let mut found: Vec<_> =
            entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|x| x == "conf")).collect();
        found.sort();
        files.extend(found);
    }
    let text = files.iter().filter_map(|f| std::fs::read_to_string(f).ok()).collect::<Vec<_>>().join("\n");
    let set =
        text.lines().filter_map(|l| l.trim().strip_prefix("RemoveIPC")?.trim_start().strip_prefix('=')).next_back();
    !matches!(set.map(|v| v.trim().to_ascii_lowercase()).as_deref(), Some("no" | "false" | "off" | "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_warned_where_logout_removes_shared_memory() {
        let root = tempfile::tempdir().unwrap();
        let memory = Path::new("/dev/shm/everstep-1000");
        let warned = |uid, memory: &Path| warning(root.path(), uid, "ada", memory).is_some();
        assert!(!warned(1000, memory), "no logind");
        std::fs::create_dir_all(root.path().join("run/systemd/users")).unwrap();
        assert!(warned(1000, memory));
        assert!(!warned(0, memory) && !warned(999, memory) && !warned(1000, Path::new("/mnt/everstep")));
        let settings = root.path().join("etc/systemd/logind.conf.d");
        std::fs::create_dir_all(&settings).unwrap();
        std::fs::write(settings.join("a.conf"), "[Login]\n#RemoveIPC=yes\nRemoveIPC = no\n").unwrap();
        assert!(!warned(1000, memory));
        std::fs::write(settings.join("b.conf"), "[Login]\nRemoveIPC=yes\n").unwrap();
        assert!(warned(1000, memory));
        std::fs::create_dir_all(root.path().join("var/lib/systemd/linger")).unwrap();
        std::fs::write(root.path().join("var/lib/systemd/linger/ada"), "").unwrap();
        assert!(!warned(1000, memory));
    }
}

//! How much memory the host has left.

/// The bytes of host memory available to this process, within the limit of its container; `None` if the system does not report them.
pub fn available() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = available.trim().strip_suffix("kB")?.trim().parse().ok()?;
    // A container may have less than the machine.
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let granted = number("/sys/fs/cgroup/memory.max");
    // Cached file pages are reclaimed when memory is short, so they count as available.
    let statistics = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let files = statistics.lines().find_map(|line| line.strip_prefix("file ")?.parse::<u64>().ok());
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0).saturating_sub(files.unwrap_or(0));
    let free = granted.map_or(u64::MAX, |granted| granted.saturating_sub(used));
    Some(kibibytes.saturating_mul(1024).min(free))
}

//! Kernel and initramfs of the guests, made from Debian's packages.
//!
//! The kernel package (about 100 MB) is downloaded once by `apt-get download`, never installed,
//! and unpacked into a cache outside the repository: `LOCKSTEP_GUEST_CACHE`, else
//! `$XDG_CACHE_HOME/lockstep/guest`, else `~/.cache/lockstep/guest`. The initramfs holds this
//! machine's busybox, drbd-utils and e2fsprogs with their libraries, the kernel's modules that
//! tests ask for, and a small init. Nothing here starts a guest.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

use crate::run;

/// Which DRBD a guest's kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrbdModule {
    /// 8.4, as the distribution ships it.
    Distribution,
    /// 9, from the directory that [`DRBD9_MODULES`] names.
    Nine,
}

/// Names the directory with `drbd.ko` and `drbd_transport_tcp.ko` of DRBD 9, built for the guests'
/// kernel, and with [`BALANCING`] where there is one. No distribution has them.
pub const DRBD9_MODULES: &str = "LOCKSTEP_DRBD9_MODULES";

/// DRBD 9's transport over all paths at once.
pub const BALANCING: &str = "drbd_transport_lb-tcp";

/// What QEMU boots, and which modules can be loaded afterwards.
#[derive(Clone, Debug)]
pub struct Image {
    /// Version of the kernel, as in `uname -r`.
    pub version: String,
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// Modules with those that must be loaded before, the module itself last.
    order: BTreeMap<String, Vec<String>>,
}

impl Image {
    /// The image of this machine, made or downloaded when the first test asks.
    pub fn of_this_machine(drbd: DrbdModule) -> Result<&'static Image> {
        static DISTRIBUTION: OnceLock<Result<Image, String>> = OnceLock::new();
        static NINE: OnceLock<Result<Image, String>> = OnceLock::new();
        let image = match drbd {
            DrbdModule::Distribution => &DISTRIBUTION,
            DrbdModule::Nine => &NINE,
        };
        image
            .get_or_init(|| Image::build(drbd).map_err(|e| format!("{e:#}")))
            .as_ref()
            .map_err(|text| anyhow::anyhow!("making the guests' image: {text}"))
    }

    /// What to load, in order, for a module; nothing for one that the kernel has built in.
    pub fn load_order(&self, module: &str) -> Result<&[String]> {
        self.order
            .get(&plain(module))
            .map(Vec::as_slice)
            .with_context(|| format!("the image does not hold the module {module}"))
    }

    fn build(drbd: DrbdModule) -> Result<Image> {
        let cache = cache_directory()?;
        fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
        // Several test programs may want the image at once: one makes it, the others wait.
        let lock = fs::File::create(cache.join("lock"))?;
        lock.lock().context("locking the cache")?;
        let kernel = kernel_directory(&cache)?;
        let version = fs::read_to_string(kernel.join("version"))?;
        let mut order = read_order(&fs::read_to_string(kernel.join("order"))?);
        let others = match drbd {
            DrbdModule::Distribution => BTreeMap::new(),
            DrbdModule::Nine => drbd9_modules(&version, &mut order)?,
        };
        let initramfs = initramfs(&cache, &kernel, &order, &others)?;
        Ok(Image {
            version,
            kernel: kernel.join("vmlinuz"),
            initramfs,
            order,
        })
    }
}

/// The files of DRBD 9's modules by name; their order of loading replaces that of 8.4.
fn drbd9_modules(
    version: &str,
    order: &mut BTreeMap<String, Vec<String>>,
) -> Result<BTreeMap<String, PathBuf>> {
    let directory =
        std::env::var_os(DRBD9_MODULES).with_context(|| format!("no {DRBD9_MODULES}"))?;
    let mut files = BTreeMap::new();
    for file in ["drbd", "drbd_transport_tcp", BALANCING] {
        let path = Path::new(&directory).join(format!("{file}.ko"));
        if file == BALANCING && !path.exists() {
            continue;
        }
        let name = plain(file);
        let module = fs::read(&path).with_context(|| format!("{}", path.display()))?;
        let magic = modinfo(&module, "vermagic").unwrap_or_default();
        let built_for = magic.split(' ').next().unwrap_or_default();
        ensure!(
            built_for == version,
            "{} was built for the kernel {built_for:?}, but the guests run {version}: build it for that",
            path.display()
        );
        let mut line = Vec::new();
        for other in modinfo(&module, "depends").unwrap_or_default().split(',') {
            let before = order.get(&plain(other)).cloned().unwrap_or_default();
            line.extend(
                before
                    .into_iter()
                    .filter(|n| !line.contains(n))
                    .collect::<Vec<_>>(),
            );
        }
        line.push(name.clone());
        order.insert(name.clone(), line);
        files.insert(name, path);
    }
    Ok(files)
}

fn cache_directory() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("LOCKSTEP_GUEST_CACHE") {
        return Ok(PathBuf::from(path));
    }
    if let Some(path) = std::env::var_os("XDG_CACHE_HOME") {
        return Ok(PathBuf::from(path).join("lockstep/guest"));
    }
    let home = std::env::var_os("HOME").context("HOME is not set; set LOCKSTEP_GUEST_CACHE")?;
    Ok(PathBuf::from(home).join(".cache/lockstep/guest"))
}

/// The unpacked kernel; downloaded if the cache has none of this layout.
fn kernel_directory(cache: &Path) -> Result<PathBuf> {
    let prefix = format!("kernel-{LAYOUT}-{:08x}-", wanted_hash());
    let mut found: Vec<PathBuf> = fs::read_dir(cache)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
            name.starts_with(&prefix) && path.join("complete").exists()
        })
        .collect();
    found.sort();
    if let Some(path) = found.pop() {
        return Ok(path);
    }
    let work = tempfile::Builder::new()
        .prefix("unpack-")
        .tempdir_in(cache)?;
    let package = download(cache, work.path())?;
    let tree = work.path().join("tree");
    fs::create_dir(&tree)?;
    run(Command::new("sh")
        .arg("-c")
        .arg("dpkg-deb --fsys-tarfile \"$0\" | tar -x -C \"$1\" ./boot ./lib/modules")
        .arg(&package)
        .arg(&tree))?;
    let modules = only_entry(&tree.join("lib/modules"))?;
    let version = modules
        .file_name()
        .and_then(|n| n.to_str())
        .context("the modules' directory has a name")?
        .to_string();
    let made = work.path().join("made");
    fs::create_dir_all(made.join("modules"))?;
    fs::copy(
        tree.join("boot").join(format!("vmlinuz-{version}")),
        made.join("vmlinuz"),
    )?;
    let order = collect_modules(&modules, &made.join("modules"))?;
    let text: String = order
        .iter()
        .map(|(name, before)| format!("{name} {}\n", before.join(" ")))
        .collect();
    fs::write(made.join("order"), text)?;
    fs::write(made.join("version"), &version)?;
    fs::write(made.join("complete"), "")?;
    let place = cache.join(format!("{prefix}{version}"));
    // What an interrupted run left has no mark `complete`.
    let _ = fs::remove_dir_all(&place);
    fs::rename(&made, &place)?;
    Ok(place)
}

/// Downloads the kernel's package; one that the cache holds is taken.
fn download(cache: &Path, work: &Path) -> Result<PathBuf> {
    let packages = cache.join("packages");
    fs::create_dir_all(&packages)?;
    let present = || -> Result<Option<PathBuf>> {
        let mut all: Vec<PathBuf> = fs::read_dir(&packages)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|e| e == "deb"))
            .collect();
        all.sort();
        Ok(all.pop())
    };
    if let Some(path) = present()? {
        return Ok(path);
    }
    let fetch = || -> Result<()> {
        let name = kernel_package()?;
        run(Command::new("apt-get")
            .args(["download", "-q", &name])
            .current_dir(work))
    };
    if let Err(first) = fetch() {
        // Lists that are missing or older than the archive: one try with new ones.
        run(Command::new("apt-get").args(["update", "-q"]))
            .with_context(|| format!("after this: {first:#}"))?;
        fetch()?;
    }
    for entry in fs::read_dir(work)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "deb") {
            let name = path.file_name().context("a package has a name")?;
            fs::rename(&path, packages.join(name))?;
        }
    }
    present()?.context("apt-get download has left no package")
}

/// The package with the newest 6.12 kernel that this system's archive has.
fn kernel_package() -> Result<String> {
    for meta in ["linux-image-6.12-amd64", "linux-image-amd64"] {
        let output = Command::new("apt-cache")
            .args(["depends", meta])
            .stdin(Stdio::null())
            .output()
            .context("apt-cache")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let name = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with("linux-image-6.12"));
        if let Some(name) = name {
            return Ok(name.to_string());
        }
    }
    bail!("this system's package archive has no linux-image-6.12 for amd64")
}

/// Unpacks the wanted modules and all that they need; answers with the order of loading.
fn collect_modules(tree: &Path, target: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let mut files = BTreeMap::new();
    find_modules(tree, &mut files)?;
    let builtin: Vec<String> = fs::read_to_string(tree.join("modules.builtin"))?
        .lines()
        .filter_map(|line| Some(plain(Path::new(line).file_stem()?.to_str()?)))
        .collect();
    let mut needs: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut open: Vec<String> = WANTED.iter().map(|name| plain(name)).collect();
    while let Some(name) = open.pop() {
        if needs.contains_key(&name) || builtin.contains(&name) {
            continue;
        }
        let file = files
            .get(&name)
            .with_context(|| format!("the kernel's package has no module {name}"))?;
        let bytes = unpacked(file)?;
        fs::write(target.join(format!("{name}.ko")), &bytes)?;
        let depends: Vec<String> = modinfo(&bytes, "depends")
            .unwrap_or_default()
            .split(',')
            .filter(|n| !n.is_empty())
            .map(plain)
            .filter(|n| !builtin.contains(n))
            .collect();
        open.extend(depends.iter().cloned());
        needs.insert(name, depends);
    }
    let mut order: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in needs.keys() {
        let mut line = Vec::new();
        before(name, &needs, &mut line);
        order.insert(name.clone(), line);
    }
    for name in builtin {
        order.insert(name, Vec::new());
    }
    Ok(order)
}

/// Appends what `name` needs, then `name`.
fn before(name: &str, needs: &BTreeMap<String, Vec<String>>, line: &mut Vec<String>) {
    if line.iter().any(|n| n == name) {
        return;
    }
    for other in needs.get(name).into_iter().flatten() {
        before(other, needs, line);
    }
    line.push(name.to_string());
}

fn find_modules(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            find_modules(&path, files)?;
            continue;
        }
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        if let Some(stem) = name.strip_suffix(".ko.xz").or(name.strip_suffix(".ko")) {
            files.insert(plain(stem), path.clone());
        }
    }
    Ok(())
}

fn unpacked(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_some_and(|e| e == "ko") {
        return Ok(fs::read(file)?);
    }
    let output = Command::new("xz")
        .arg("-dc")
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .context("xz")?;
    ensure!(output.status.success(), "xz -dc {}", file.display());
    Ok(output.stdout)
}

/// A field of a module's information section, where fields are `name=value` between zero bytes.
fn modinfo(module: &[u8], field: &str) -> Option<String> {
    let key = format!("\0{field}=");
    let at = module
        .windows(key.len())
        .position(|window| window == key.as_bytes())?
        + key.len();
    let end = at + module[at..].iter().position(|&byte| byte == 0)?;
    String::from_utf8(module[at..end].to_vec()).ok()
}

/// Module names are the same with hyphens and underscores.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

fn read_order(text: &str) -> BTreeMap<String, Vec<String>> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().map(str::to_string);
            Some((words.next()?, words.collect()))
        })
        .collect()
}

fn only_entry(directory: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(directory)?;
    let entry = entries.next().context("an empty directory")??;
    Ok(entry.path())
}

fn wanted_hash() -> u32 {
    let mut hasher = DefaultHasher::new();
    WANTED.hash(&mut hasher);
    hasher.finish() as u32
}

/// The initramfs for this kernel and this machine's programs; an equal one in the cache is taken.
/// `others` are modules that are not the kernel package's.
fn initramfs(
    cache: &Path,
    kernel: &Path,
    order: &BTreeMap<String, Vec<String>>,
    others: &BTreeMap<String, PathBuf>,
) -> Result<PathBuf> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for program in PROGRAMS {
        let path = find_program(program)?;
        for library in libraries(&path)? {
            files.insert(relative(&library), library);
        }
        files.insert(program.trim_start_matches('/').to_string(), path);
    }
    for name in order.keys() {
        let file = match others.get(name) {
            Some(file) => file.clone(),
            None => kernel.join("modules").join(format!("{name}.ko")),
        };
        if file.exists() {
            files.insert(format!("lib/modules/{name}.ko"), file);
        }
    }
    let mut boot: Vec<&str> = Vec::new();
    for module in AT_BOOT
        .iter()
        .copied()
        .chain(others.keys().map(String::as_str))
    {
        let line = order
            .get(module)
            .with_context(|| format!("{module} is not among the modules"))?;
        for name in line {
            if !boot.contains(&name.as_str()) {
                boot.push(name);
            }
        }
    }
    let boot = boot.join("\n") + "\n";
    let mut hasher = DefaultHasher::new();
    (INIT, &boot).hash(&mut hasher);
    for (name, path) in &files {
        let meta = fs::metadata(path).with_context(|| format!("{}", path.display()))?;
        (name, meta.len(), meta.mtime()).hash(&mut hasher);
    }
    let place = cache.join(format!("initramfs-{:016x}.cpio", hasher.finish()));
    if place.exists() {
        return Ok(place);
    }
    let mut archive = Archive::default();
    for directory in DIRECTORIES {
        archive.directory(directory);
    }
    archive.console();
    for (name, path) in &files {
        let mode = fs::metadata(path)?.permissions().mode() & 0o777;
        archive.file(name, mode, &fs::read(path)?);
    }
    archive.file("lib/modules/boot-order", 0o644, boot.as_bytes());
    archive.file("init", 0o755, INIT.as_bytes());
    let applets = Command::new("busybox").arg("--list").output()?;
    for applet in String::from_utf8_lossy(&applets.stdout).lines() {
        if applet != "busybox" {
            archive.link(&format!("bin/{applet}"), "/bin/busybox");
        }
    }
    let mut file = tempfile::NamedTempFile::new_in(cache)?;
    file.write_all(&archive.finish())?;
    file.persist(&place)?;
    Ok(place)
}

fn relative(path: &Path) -> String {
    path.display()
        .to_string()
        .trim_start_matches('/')
        .to_string()
}

fn find_program(program: &str) -> Result<PathBuf> {
    let name = Path::new(program)
        .file_name()
        .context("a program has a name")?;
    let mut places = vec![PathBuf::from(program)];
    for directory in [
        "/sbin",
        "/usr/sbin",
        "/bin",
        "/usr/bin",
        "/lib/drbd",
        "/usr/lib/drbd",
    ] {
        places.push(Path::new(directory).join(name));
    }
    places
        .into_iter()
        .find(|path| path.exists())
        .with_context(|| format!("{program} is missing on this machine (scripts/prepare)"))
}

/// The shared libraries of a program and its loader; none for a static one.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .stdin(Stdio::null())
        .output()
        .context("ldd")?;
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            let word = match line.split_once("=>") {
                Some((_, path)) => path.split_whitespace().next()?,
                None => line.split_whitespace().next()?,
            };
            word.starts_with('/').then(|| PathBuf::from(word))
        })
        .collect())
}

/// A cpio archive of the form "newc", the one that the kernel unpacks.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    directories: Vec<String>,
    inode: u32,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inode += 1;
        let fields = [
            self.inode,
            mode,
            0, // user
            0, // group
            1, // links
            0, // time
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0, // no checksum in this form
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }

    fn directory(&mut self, name: &str) {
        if name.is_empty() || self.directories.iter().any(|d| d == name) {
            return;
        }
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.directory(parent);
        }
        self.directories.push(name.to_string());
        self.entry(name, 0o040_755, (0, 0), &[]);
    }

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.directory(parent);
        }
        self.entry(name, 0o100_000 | mode, (0, 0), content);
    }

    fn link(&mut self, name: &str, target: &str) {
        self.entry(name, 0o120_777, (0, 0), target.as_bytes());
    }

    /// The first process writes its errors there before it has mounted anything.
    fn console(&mut self) {
        self.directory("dev");
        self.entry("dev/console", 0o020_600, (5, 1), &[]);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }
}

/// Changes when the form of the cache changes.
const LAYOUT: u32 = 1;

/// Programs of this machine that the guests have, at these places. drbdadm and drbdsetup start
/// the two others when the kernel's module is 8.4.
const PROGRAMS: &[&str] = &[
    "/bin/busybox",
    "/sbin/drbdadm",
    "/sbin/drbdsetup",
    "/sbin/drbdmeta",
    "/lib/drbd/drbdadm-84",
    "/lib/drbd/drbdsetup-84",
    "/sbin/dmsetup",
    "/sbin/mkfs.ext4",
    "/sbin/e2fsck",
];

const DIRECTORIES: &[&str] = &[
    "bin",
    "dev",
    "etc",
    "host",
    "lib",
    "mnt",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "var/lib/drbd",
    "var/lock",
    "var/run",
];

/// Modules that the image holds, with those that they need.
const WANTED: &[&str] = &[
    "9p",
    "9pnet_virtio",
    "brd",
    "crc32c_generic",
    "crc32c_intel",
    "dm_delay",
    "dm_flakey",
    "drbd",
    "ext4",
    "fuse",
    "hmac",
    "loop",
    "md5",
    "nbd",
    "nd_pmem",
    "nfit",
    "null_blk",
    "rdma_rxe",
    "sch_netem",
    "sch_tbf",
    "sha1_generic",
    "sha256_generic",
    "ublk_drv",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "virtio_pci",
    "xfs",
];

/// Loaded by init; others by [`crate::guest::Guest::load_module`].
const AT_BOOT: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "virtio_net",
    "crc32c_generic",
    "crc32c_intel",
    "sha1_generic",
    "sha256_generic",
    "md5",
    "hmac",
    "ext4",
    "drbd",
];

/// The first process: prepares the machine, then runs the host's commands one by one.
///
/// A command arrives as `NUMBER BASE64` on the port named `lockstep`; the answer is its output
/// in base64 lines and `END NUMBER STATUS`. When the host goes away, the guest ends.
const INIT: &str = r#"#!/bin/sh
export PATH=/sbin:/usr/sbin:/bin:/usr/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
addresses=
for word in $(cat /proc/cmdline); do
    case $word in
        guest.name=*) hostname "${word#*=}" ;;
        guest.addresses=*) addresses=$(echo "${word#*=}" | tr , ' ') ;;
    esac
done
while read -r module; do
    insmod "/lib/modules/$module.ko" || echo "insmod $module failed"
done < /lib/modules/boot-order
ifconfig lo 127.0.0.1 up
number=0
for address in $addresses; do
    ifconfig eth$number "$address" netmask 255.255.255.0 up
    number=$((number + 1))
done
if [ -z "$addresses" ] && ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up; then
    route add default gw 10.0.2.2
fi
for directory in /sys/class/virtio-ports/*; do
    [ "$(cat "$directory/name")" = lockstep ] && port=/dev/${directory##*/}
done
echo "guest ready" > /dev/kmsg
exec 3<> "$port"
echo "READY" >&3
while read -r number code <&3; do
    echo "$code" | base64 -d > /run/command
    sh /run/command > /run/output 2>&1 < /dev/null 3>&-
    status=$?
    base64 /run/output >&3
    echo "END $number $status" >&3
done
echo "the host has gone" > /dev/console
poweroff -f
"#;

#[cfg(test)]
mod tests {
    use super::{before, modinfo};
    use std::collections::BTreeMap;

    #[test]
    fn a_field_of_a_module_is_found_between_zero_bytes() {
        let module = b"\x7fELF\0license=GPL\0depends=lru_cache,libcrc32c\0name=drbd\0";
        assert_eq!(
            modinfo(module, "depends").as_deref(),
            Some("lru_cache,libcrc32c")
        );
        assert_eq!(modinfo(module, "alias"), None);
    }

    #[test]
    fn modules_are_loaded_after_what_they_need() {
        let needs: BTreeMap<String, Vec<String>> = [("a", vec!["b", "c"]), ("b", vec!["c"])]
            .into_iter()
            .map(|(n, d)| (n.into(), d.into_iter().map(String::from).collect()))
            .collect();
        let mut line = Vec::new();
        before("a", &needs, &mut line);
        assert_eq!(line, ["c", "b", "a"]);
    }
}

//! Taking away what a running proxy does not need: root, all capabilities but that for ports below
//! 1024, and the system calls of programs that do more than move bytes.

use std::collections::BTreeMap;
use std::path::Path;

use rustix::fs::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// A user of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User {
    uid: Uid,
    gid: Gid,
}

impl User {
    /// Looks a name up in the text of `/etc/passwd`; a number is taken for user and group.
    pub(super) fn find(name: &str, passwd: &str) -> Result<User, String> {
        let unknown = || format!("--user {name}: there is no such user");
        let (uid, gid) = if let Ok(number) = name.parse::<u32>() {
            (number, number)
        } else {
            let line = passwd
                .lines()
                .find(|line| line.split(':').next() == Some(name));
            let mut fields = line.ok_or_else(unknown)?.split(':').skip(2);
            let mut number = || fields.next()?.parse::<u32>().ok();
            (number().ok_or_else(unknown)?, number().ok_or_else(unknown)?)
        };
        if uid == 0 || uid == u32::MAX || gid == u32::MAX {
            return Err(format!("--user {name}: must be another one than root"));
        }
        Ok(User {
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(gid),
        })
    }

    /// Makes the directory of a file of this user, unless it exists.
    pub(super) fn make_directory_of(&self, file: &Path) -> Result<(), String> {
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let Some(directory) = file.parent().filter(missing) else {
            return Ok(());
        };
        let named = |error: std::io::Error| format!("{}: {error}", directory.display());
        std::fs::create_dir_all(directory).map_err(named)?;
        let (uid, gid) = (self.uid.as_raw(), self.gid.as_raw());
        std::os::unix::fs::chown(directory, Some(uid), Some(gid)).map_err(named)
    }

    /// Becomes this user for good, keeping only the right to ports below 1024. This process must
    /// have no other thread yet.
    pub(super) fn become_it(&self) -> Result<(), String> {
        let failed = |error: rustix::io::Errno| format!("--user: {error}; it needs root");
        let kept = CapabilitySet::NET_BIND_SERVICE;
        rustix::thread::set_keep_capabilities(true).map_err(failed)?;
        rustix::thread::set_thread_groups(&[self.gid]).map_err(failed)?;
        rustix::thread::set_thread_gid(self.gid).map_err(failed)?;
        rustix::thread::set_thread_uid(self.uid).map_err(failed)?;
        let sets = CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, sets).map_err(failed)
    }
}

/// Answers every system call that a proxy has no use for with "function not implemented", for this
/// thread and all that it starts. Says whether this kind of processor is supported.
pub(super) fn forbid_other_calls() -> Result<bool, String> {
    let Ok(arch) = TargetArch::try_from(std::env::consts::ARCH) else {
        return Ok(false);
    };
    let rules: BTreeMap<i64, Vec<_>> = NEEDED.iter().map(|call| (*call, Vec::new())).collect();
    let refused = SeccompAction::Errno(rustix::io::Errno::NOSYS.raw_os_error() as u32);
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, arch);
    let program: BpfProgram = filter
        .and_then(BpfProgram::try_from)
        .map_err(|error| format!("seccomp: {error}"))?;
    seccompiler::apply_filter(&program).map_err(|error| format!("seccomp: {error}"))?;
    Ok(true)
}

/// Neither starting programs, nor mounts, modules, keys or tracing.
const NEEDED: &[i64] = &[
    // Bytes and files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_faccessat,
    // Sockets and waiting.
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_shutdown,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    // Memory, threads, time.
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_clone,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    // The same by older names.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
         proxy:x:13:14:proxy:/bin:/usr/sbin/nologin\n\
         toor:x:0:0::/root:/bin/sh\nbroken:x\n";

    #[test]
    fn a_user_is_found_by_name_or_number_and_is_never_root() {
        let user = |uid, gid| User {
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(gid),
        };
        assert_eq!(User::find("proxy", PASSWD), Ok(user(13, 14)));
        assert_eq!(User::find("1234", PASSWD), Ok(user(1234, 1234)));
        for name in ["root", "toor", "0", "4294967295"] {
            let error = User::find(name, PASSWD).unwrap_err();
            assert!(error.contains("than root"), "{error}");
        }
        for name in ["nobody-here", "broken", ""] {
            let error = User::find(name, PASSWD).unwrap_err();
            assert!(error.contains("no such user"), "{error}");
        }
    }
}

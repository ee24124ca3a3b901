# The functions that scripts of the Open Cluster Framework find in `ocf-shellfuncs`, as far as
# ocf:linbit:drbd calls them. Written for the tests: a cluster manager is not installed.
OCF_SUCCESS=0 OCF_ERR_GENERIC=1 OCF_ERR_ARGS=2 OCF_ERR_UNIMPLEMENTED=3 OCF_ERR_PERM=4
OCF_ERR_INSTALLED=5 OCF_ERR_CONFIGURED=6 OCF_NOT_RUNNING=7
OCF_RUNNING_MASTER=8 OCF_FAILED_MASTER=9 OCF_RUNNING_PROMOTED=8 OCF_FAILED_PROMOTED=9
__OCF_ACTION=$1
set_logtag() { :; }
ocf_log() { local level=$1; shift; echo "$level: $*" >&2; }
ocf_exit_reason() { echo "reason: $*" >&2; }
ocf_is_true() { case "$1" in yes | true | on | 1 | YES | TRUE | ON) true ;; *) false ;; esac; }
ocf_is_probe() { [ "$__OCF_ACTION" = monitor ] && [ "${OCF_RESKEY_CRM_meta_interval:-0}" = 0 ]; }
ocf_is_ms() { [ "${OCF_RESKEY_CRM_meta_master_max:-0}" -gt 0 ]; }
ocf_version_cmp() { echo 1; }
have_binary() { command -v "$1" >/dev/null; }
check_binary() { have_binary "$1" || exit $OCF_ERR_INSTALLED; }

#!/bin/sh
# Stands for drbdsetup and drbdmeta in tests: writes its name and words to a log and exits as the
# files "fail" (a command) and "code" in the node's directory say.
cd "$LOCKSTEP_DIR" || exit 99
echo "${0##*/} $*" >> log
if [ "$1" = "$(cat fail 2>/dev/null)" ]; then
    echo "refused" >&2
    exit "$(cat code)"
fi
exit 0

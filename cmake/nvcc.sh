#!/bin/sh
# CMake's launcher of nvcc, whose command line its arguments are: what ptxas says of each kernel's registers and memory
# goes into OBJECT.ptxas beside the object (scripts/ptxas.py reads it), everything else to stderr as ever.
set -u
for object; do :; done  # the last argument
log=$object.ptxas
"$@" 2>"$log.partial"
code=$?
grep -v -e '^ptxas info ' -e '^    [0-9]* bytes stack frame' "$log.partial" >&2
c++filt <"$log.partial" >"$log"
rm "$log.partial"
exit $code

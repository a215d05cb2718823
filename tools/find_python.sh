#!/bin/sh
# Print the path of a Python that can make the virtual environment: 3.11 to 3.14, with venv, pip and
# the C headers. An argument is the only candidate. Prints sys.executable, not the name it was found
# under: `python3` may be a shell shim (pyenv), which sanitizers cannot be loaded into.
set -u

probe='
import sys, sysconfig, os
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit("version %d.%d; 3.11 to 3.14 is needed" % sys.version_info[:2])
try:
    import venv, ensurepip
except ImportError:
    sys.exit("no venv or ensurepip module; on Debian and Ubuntu: apt install python3-venv")
if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("no Python.h; on Debian and Ubuntu: apt install python3-dev")
print(sys.executable)
'

if [ $# -gt 0 ]; then
    candidates=$1
else
    candidates="python3 python3.13 python3.12 python3.11 python3.14 python"
fi
reasons=""
for candidate in $candidates; do
    if ! command -v "$candidate" >/dev/null 2>&1; then
        continue
    fi
    # The shim of a version that is not selected exists and fails: its text is the reason.
    if found=$("$candidate" -c "$probe" 2>&1); then
        echo "$found"
        exit 0
    fi
    reasons="$reasons
  $candidate: $(echo "$found" | head -n 1)"
done
echo "No usable Python among: $candidates$reasons
Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.12 ..." >&2
exit 1

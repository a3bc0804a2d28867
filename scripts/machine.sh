# Functions for the other scripts: check and install system libraries and programs, make a virtual environment. Sourced, not run.
#
#   INSTALL_SYSTEM=0    never call apt-get: only name what is missing

# need_system WHAT_FOR DEBIAN_PACKAGE RPM_PACKAGE TEST...: returns 0 if the command TEST succeeds, at once or after apt-get has
# installed the Debian package (only as root). Otherwise prints one line that says what to install, and returns 1. Prints nothing
# on success.
need_system() {
    local purpose=$1 debian=$2 rpm=$3
    shift 3
    "$@" >/dev/null 2>&1 && return 0
    if [ "${INSTALL_SYSTEM:-1}" != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "== installing the system package $debian ($purpose)" >&2
        _apt_install "$debian" || { apt-get update -qq >/dev/null 2>&1 && _apt_install "$debian"; } || true
        "$@" >/dev/null 2>&1 && return 0
    fi
    echo "This machine lacks $debian ($purpose). As root: apt-get install $debian (Debian, Ubuntu), or dnf install $rpm" \
         "(openEuler, RHEL); then start this again." >&2
    return 1
}

_apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null 2>&1
}

# unpack_programs FOLDER PACKAGE...: downloads Debian packages and unpacks them below FOLDER without installing them, because that
# would start their services. Returns 1 if it cannot.
unpack_programs() {
    local folder=$1 work package
    shift
    [ -e "$folder" ] && return 0
    { [ "${INSTALL_SYSTEM:-1}" != 0 ] && command -v apt-get && command -v dpkg; } >/dev/null || return 1
    work=$(mktemp -d)
    (cd "$work" && { apt-get download -qq "$@" || { apt-get update -qq && apt-get download -qq "$@"; }; }) >/dev/null 2>&1 &&
        for package in "$work"/*.deb; do dpkg -x "$package" "$work/root" || break; done &&
        mkdir -p "$(dirname "$folder")" && mv "$work/root" "$folder"
    rm -rf "$work"
    [ -e "$folder" ]
}

# has_library PYTHON NAME: returns 0 if the dynamic loader finds the shared library NAME.
has_library() {
    "$1" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$2"
}

# make_venv PYTHON FOLDER: makes a virtual environment with pip. If PYTHON has no ensurepip (Debian without python3-venv), its own
# pip installs pip into the new environment.
make_venv() {
    if "$1" -c 'import ensurepip' 2>/dev/null; then
        "$1" -m venv "$2"
    elif "$1" -m pip --version >/dev/null 2>&1; then
        "$1" -m venv --without-pip "$2"
        "$1" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check pip
    else
        echo "$1 has neither ensurepip nor pip. As root: apt-get install python3-venv (Debian, Ubuntu), or dnf install" \
             "python3-pip (openEuler, RHEL); then start this again." >&2
        return 1
    fi
}

# quietly COMMAND...: prints the output of COMMAND only if it fails. pip and setuptools print many harmless warnings.
quietly() {
    local output
    output=$("$@" 2>&1) && return 0
    printf '%s\n' "$output" >&2
    return 1
}

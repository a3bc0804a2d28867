#!/usr/bin/env bash
# Tries mindresume on this machine in six steps, and writes one file to attach to an issue: docs/first_ascend_run.md
#
#   bash scripts/ascend_report.sh --shared /shared/try --cards 8                  on Ascend
#   bash scripts/ascend_report.sh --shared /tmp --cards 4 --device CPU            the same steps without an NPU
#
#   --shared DIR    a folder on the disk to which trainings save (needed)
#   --cards N       cards of this machine that take part, an even number (8)
#   --device NAME   Ascend or CPU (Ascend)
#   --config FILE   YAML of your own training: step 1 examines it, nothing starts it
#   --out DIR       where results go (output/ascend_report)
#   --epochs N      length of each training, 10 steps an epoch (40 on Ascend, 12 on CPU)
#   --every K       the drill injects a fault at each K-th file operation (default: its own sample, minutes)
#   --timeout S     seconds until a step is given up (1800)
#
# mindresume, mindformers and mindspore are those of $PYTHON (python). A small Qwen3 of this repository is trained, no data of yours is
# read. The file has paths, names of this host and versions in it: look before you attach it. Exit status: 0 if all six steps did what
# they should, 1 if not, 2 for a wrong argument.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SHARED='' CARDS=8 DEVICE=Ascend CONFIG='' OUT=output/ascend_report EPOCHS='' EVERY='' TIMEOUT=1800

refuse() { echo "ascend_report.sh: error: $*" >&2; exit 2; }
while (( $# )); do
  [[ $1 == -h || $1 == --help ]] && { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0; }
  (( $# > 1 )) || refuse "$1 needs a value"
  case $1 in
    --shared) SHARED=$2 ;; --cards) CARDS=$2 ;; --device) DEVICE=$2 ;; --config) CONFIG=$2 ;;
    --out) OUT=$2 ;; --epochs) EPOCHS=$2 ;; --every) EVERY=$2 ;; --timeout) TIMEOUT=$2 ;;
    *) refuse "unknown option $1 (see --help)" ;;
  esac
  shift 2
done
[[ -d $SHARED ]] || refuse "--shared must name a folder on the disk to which trainings save, got '$SHARED'"
[[ $CARDS =~ ^(2|4|8|16)$ ]] || refuse "--cards must be 2, 4, 8 or 16, got '$CARDS'"
[[ $DEVICE == Ascend || $DEVICE == CPU ]] || refuse "--device must be Ascend or CPU, got '$DEVICE'"
EPOCHS=${EPOCHS:-$([[ $DEVICE == CPU ]] && echo 12 || echo 40)}
PYTHON=$(command -v "${PYTHON:-python}") || refuse "there is no ${PYTHON:-python} in PATH"
export PYTHON PATH="$(dirname "$PYTHON"):$PATH" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && SHARED=$(cd "$SHARED" && pwd) || exit 2
[[ -z $CONFIG || -f $CONFIG ]] || refuse "there is no $CONFIG"
WORK=$(mktemp -d "$SHARED/mindresume-report-XXXXXX") || refuse "$SHARED cannot be written"
STARTED=$(date -u +%Y%m%dT%H%M%SZ) MARK=MINDRESUME_REPORT=$$ FAILED=0
rm -f "$OUT"/*.log "$OUT"/*.md "$OUT"/*.html

# Processes of the trainings that this call has started carry its mark, so that nothing is left behind.
jobs_with() {                                          # jobs_with NAME=VALUE: processes of them with this variable
  grep -lzxF -- "$MARK" /proc/[0-9]*/environ 2>/dev/null | xargs -r grep -lzxF -- "$1" 2>/dev/null | tr -dc '0-9\n'
}
end_all() { local number; for number in $(jobs_with "$MARK"); do kill -9 "$number" 2>/dev/null; done; }
trap 'end_all; rm -rf "$WORK"' EXIT
trap 'exit 130' INT TERM

mindresume() { "$PYTHON" -m mindresume "$@"; }
lines() { local count; count=$(grep -ac "$2" "$1" 2>/dev/null); echo "${count:-0}"; }
# wait_until PROCESS COMMAND...: until the command succeeds; fails if the process ends or the time is over
wait_until() {
  local process=$1 end=$((SECONDS + TIMEOUT)); shift
  until "$@"; do
    kill -0 "$process" 2>/dev/null || { "$@"; return; }
    (( SECONDS < end )) || return 1
    sleep 0.1
  done
}
ended() { ! kill -0 "$1" 2>/dev/null; }
trained() { (( $(lines "$1" 'loss:') > 12 )) && grep -aq 'step 10 committed' "$1"; }         # steps after a save will be lost

# result NUMBER NAME LOG EXPECTED: looks for the expected line, prints it, and keeps it for the summary
result() {
  local line state=passed
  line=$(grep -aE -- "$4" "$OUT/$3" 2>/dev/null | tail -1 | sed 's/.*mindresume: //; s/^ *//' | cut -c1-160)
  [[ -n $line ]] || { state=FAILED FAILED=1; line="no line \`$4\` in $3: $(tail -n 1 "$OUT/$3" 2>/dev/null | cut -c1-120)"; }
  printf '%s. %-22s %-6s  %s\n' "$1" "$2" "$state" "$line"
  printf '| %s | %s | %s | %s |\n' "$1" "$2" "$state" "${line//|/\\|}" >>"$OUT/steps.md"
}

# configuration LAYOUT: writes the YAML of a training to its folder
configuration() {
  local dp=$((CARDS / 2))
  if [[ $1 == one ]]; then
    cp "$ROOT/configs/quickstart_qwen3.yaml" my.yaml
  else
    sed "s/data_parallel: &dp 2 /data_parallel: \&dp $dp /; s/^  batch_size: 4 /  batch_size: $((8 / dp)) /" \
      "$ROOT/configs/quickstart_qwen3_dp2tp2.yaml" >my.yaml
  fi
}
# start FOLDER LAYOUT WORKERS LOG: starts a training; its process is JOB
start() {
  local program=run_mindformer.py
  [[ $DEVICE == CPU ]] && program="$ROOT/st/cpu_cluster/run.py $ROOT/run_mindformer.py" || program="$ROOT/run_mindformer.py"
  mkdir -p "$WORK/$1" && cd "$WORK/$1" && configuration "$2"
  MINDRESUME_REPORT=$$ setsid bash "$ROOT/scripts/msrun_launcher.sh" "$program --config my.yaml --run_mode train \
    --train_dataset $WORK/data/mcore.mindrecord --device_target $DEVICE --epochs $EPOCHS" \
    "$3" "$PORT" output/msrun_log True 600 >>"$OUT/$4" 2>&1 </dev/null &
  JOB=$!
}
free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
PORT=$(free_port)

echo "mindresume on $DEVICE, $CARDS cards; results in $OUT"
# ---- 1 doctor
mindresume doctor --dir "$SHARED" ${CONFIG:+--config "$CONFIG"} >"$OUT/doctor.log" 2>&1
result 1 doctor doctor.log '^a training can start here'
# ---- 2 drill on the shared disk
timeout "$TIMEOUT" "$PYTHON" -m mindresume drill --dir "$SHARED" ${EVERY:+--every "$EVERY"} >"$OUT/drill.log" 2>&1
result 2 drill drill.log '^\| all \| .*\| ([0-9]+) \| \1 \| 0 \| 0 \| 0 \| 0 \|$'
# ---- 3 one card: killed in the middle, the same command again, the proof
"$PYTHON" "$ROOT/st/data/make_data.py" "$WORK/data" >"$OUT/data.log" 2>&1
start one_card one 1 one_card.log
wait_until "$JOB" trained "$OUT/one_card.log" && end_all
{ wait "$JOB"; } 2>/dev/null                          # without bash's own line about the kill
start one_card one 1 one_card.log
wait_until "$JOB" ended "$JOB"
mindresume proof "$WORK/one_card/output" >"$OUT/one_card_proof.log" 2>&1
result 3 'one card' one_card_proof.log ' (proved|weights) '
# ---- 4 all cards
start cards several "$CARDS" cards.log
wait_until "$JOB" ended "$JOB"
result 4 "$CARDS cards" cards.log "committed: $CARDS ranks"
# ---- 5 the supervisor: a rank is killed, the job starts again by itself
PORT=$(free_port)
MSRUN_RESTARTS=3 start supervised several "$CARDS" supervised.log
if wait_until "$JOB" trained "$OUT/supervised.log"; then
  for process in $(jobs_with RANK_ID=1); do
    grep -qzxF MS_ROLE=MS_WORKER "/proc/$process/environ" 2>/dev/null && kill -9 "$process" 2>/dev/null
  done
fi
wait_until "$JOB" ended "$JOB"
end_all
result 5 supervisor supervised.log 'the job ended with status 0 after [2-9] starts'
mindresume proof "$WORK/supervised/output" >"$OUT/supervised_proof.log" 2>&1
result 5 'its proof' supervised_proof.log ' (proved|weights) '
# ---- 6 the report, and one file
cd "$OUT" || exit 1
mindresume report "$WORK/supervised" -o "$OUT/report.html" >"$OUT/report.log" 2>&1
[[ -s $OUT/report.html ]] && echo 'report.html is written' >>"$OUT/report.log"
result 6 report report.log '^report.html is written'
{
  echo "# mindresume on $DEVICE: $STARTED"
  echo
  echo "Result: $( (( FAILED )) && echo 'not all steps did what they should' || echo 'all steps passed'). $CARDS cards, $EPOCHS epochs."
  printf '\n| step | | result | line |\n|---|---|---|---|\n'
  cat steps.md
  printf '\n```\n'
  mindresume --version
  uname -srm
  echo "cards: $(ls -d /dev/davinci[0-9]* 2>/dev/null | wc -l); CANN: ${ASCEND_TOOLKIT_HOME:-${ASCEND_HOME_PATH:-none}}"
  cat "${ASCEND_TOOLKIT_HOME:-/nonexistent}"/version.cfg 2>/dev/null | head -5
  echo "disk of $SHARED: $(df -PT "$SHARED" | awk 'NR == 2 { print $2 }'); /dev/shm: $(df -Ph /dev/shm | awk 'NR == 2 { print $4 }') free"
  echo "processors: $(nproc); memory: $(awk '/MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
  echo "MS_ENABLE_TFT: ${MS_ENABLE_TFT:-not set}"
  command -v npu-smi >/dev/null && timeout 60 npu-smi info
  printf '```\n\nFrom the death of the rank to the next step:\n\n```\n'
  grep -ahoE 'mindresume: (start [0-9]+ (trains|ended|follows)|rank [0-9]+ .* was killed).*' supervised.log
  printf '```\n'
} >summary.md 2>&1
rm -f steps.md
mkdir -p files && rm -rf files/* && cp -r "$WORK"/supervised/output/mindresume_events files/ 2>/dev/null
cp "$WORK"/cards/output/msrun_log/worker_0.log files/ 2>/dev/null
"$PYTHON" -m pip list --disable-pip-version-check >files/packages.txt 2>/dev/null
FILE=$OUT/ascend_report_$STARTED.tar.gz
tar -czf "$FILE" summary.md *.log report.html files 2>/dev/null
rm -rf files
echo "$( (( FAILED )) && echo 'not all steps passed' || echo 'all steps passed'); attach to an issue: $FILE"
exit "$FAILED"

#!/usr/bin/env bash
# The tutorial's curl examples and one of every other route, with assertions, against a running server:
#
#   bash ./test/test_curl.sh [URL] [PASSWORD]
#
# RWKV_MAX_TOKENS shortens the answers. Ends with 0 when every example was answered as it should be.
set -uo pipefail

URL=${1:-${RWKV_URL:-http://localhost:8000}}
PASSWORD=${2:-${RWKV_PASSWORD:-rwkv7_7.2b}}
MAX_TOKENS=${RWKV_MAX_TOKENS:-32}
SESSION="curl_$$_$(date +%s)"
failures=0

# post PATH BODY: the answer's body in $body, its status in $status
post() {
  body=$(curl -sS -m 300 -N -X POST "$URL$1" -H "Content-Type: application/json" \
    -H "Authorization: Bearer $PASSWORD" -d "$2" -w '\n%{http_code}')
  status=${body##*$'\n'}
  body=${body%$'\n'*}
}

# get PATH: the same for a GET
get() {
  body=$(curl -sS -m 60 "$URL$1" -H "Authorization: Bearer $PASSWORD" -w '\n%{http_code}')
  status=${body##*$'\n'}
  body=${body%$'\n'*}
}

# expect NAME STATUS PATTERN...: each pattern must be in the body
expect() {
  local name=$1 wanted=$2 pattern
  shift 2
  if [ "$status" != "$wanted" ]; then
    echo "FAIL $name: status $status instead of $wanted: ${body:0:300}"
    failures=$((failures + 1))
    return
  fi
  for pattern in "$@"; do
    if ! grep -qE -- "$pattern" <<<"$body"; then
      echo "FAIL $name: no $pattern in: ${body:0:300}"
      failures=$((failures + 1))
      return
    fi
  done
  echo "ok   $name"
}

BULK='"contents": [
    "English: After a blissful two weeks, Jane encounters Rochester in the gardens. He invites her to walk with him, and Jane, caught off guard, accepts.\n\nChinese:",
    "English: That night, a bolt of lightning splits the same chestnut tree under which Rochester and Jane had been sitting that evening.\n\nChinese:"
  ], "max_tokens": '$MAX_TOKENS', "stop_tokens": [0, 261, 24281]'
SAMPLING='"temperature": 0.8, "top_k": 50, "top_p": 0.6, "alpha_presence": 1.0, "alpha_frequency": 0.1, "alpha_decay": 0.99'
LOCK='"password": "'$PASSWORD'"'

post /v1/chat/completions "{$BULK, $SAMPLING, \"stream\": true, $LOCK}"
expect "v1, streamed" 200 '^data: \{"object": ?"chat.completion.chunk"' '"index": ?0' '"index": ?1' '"finish_reason"' '^data: \[DONE\]$'
post /v1/chat/completions "{$BULK, $SAMPLING, \"stream\": false, $LOCK}"
expect "v1, whole" 200 '"id": ?"rwkv7-batch"' '"object": ?"chat.completion"' '"role": ?"assistant"' '"usage"'

V2='"temperature": 1.0, "top_k": 1, "top_p": 0.3, "pad_zero": true, "alpha_presence": 0.8, "alpha_frequency": 0.8, "alpha_decay": 0.996'
post /v2/chat/completions "{$BULK, $V2, \"chunk_size\": 128, \"stream\": true, $LOCK}"
expect "v2, streamed" 200 '^data: \{"object": ?"chat.completion.chunk"' '^data: \[DONE\]$'
post /v2/chat/completions "{$BULK, $V2, \"chunk_size\": 32, \"stream\": false, $LOCK}"
expect "v2, whole" 200 '"object": ?"chat.completion"' '"finish_reason"'

post /big_batch/completions "{$BULK, \"temperature\": 1.0, \"chunk_size\": 8, \"stream\": true, $LOCK}"
expect "big_batch" 200 '^data: \{' '"index": ?1' '^data: \[DONE\]$'

get /big_batch/completions-status
expect "big_batch status" 200 '"generating": ?(true|false)'
post /big_batch/clean "{$LOCK}"
expect "big_batch clean" 200 '"status": ?"success"'

post /FIM/v1/batch-FIM "{\"prefix\": [\"def add(a, b):\"], \"suffix\": [\"print(add(1, 2))\"], \"max_tokens\": $MAX_TOKENS, $LOCK}"
expect "fill in the middle" 200 '"object": ?"FIM.completion"'

TALK='"model": "rwkv7", "messages": [
  {"role": "system", "content": "You are a helpful assistant."},
  {"role": "user", "content": "please tell me about the history of artificial intelligence"}],
  "top_p": 0.6, "max_tokens": '$MAX_TOKENS', "temperature": 0.8'
post /openai/v1/chat/completions "{$TALK, \"stream\": true}"
expect "openai, streamed" 200 '"object": ?"chat.completion.chunk"' '"role": ?"assistant"' '^data: \[DONE\]$'
post /openai/v1/chat/completions "{$TALK, \"stream\": false}"
expect "openai, whole" 200 '"id": ?"chatcmpl-' '"usage"'

post /openai/v1/chat/completions "{$TALK, \"session_id\": \"${SESSION}_openai\"}"
expect "openai, a session" 200 '"cached_tokens": ?0'
post /openai/v1/chat/completions "{$TALK, \"session_id\": \"${SESSION}_openai\"}"
expect "openai, the session again" 200 '"cached_tokens": ?[1-9]'
post /openai/v1/completions "{\"prompt\": \"Once upon a time\", \"max_tokens\": $MAX_TOKENS}"
expect "openai, a raw prompt" 200 '"object": ?"text_completion"'
post /openai/v1/chat/completions "{$TALK, \"tools\": [{}]}"
expect "openai, a wrong field" 400 '"param": ?"tools'

post /translate/v1/batch-translate "{\"source_lang\": \"en\", \"target_lang\": \"zh-CN\", \"text_list\": [\"Hello world!\", \"Good morning\"], $LOCK}"
expect "translate to Chinese" 200 '"translations": ?\[' '"detected_source_lang": ?"en"'
post /translate/v1/batch-translate "{\"source_lang\": \"zh-CN\", \"target_lang\": \"en\", \"text_list\": [\"你好世界\", \"早上好\"], $LOCK}"
expect "translate from Chinese" 200 '"detected_source_lang": ?"zh-CN"'

TURN='"contents": ["User: What should we eat for dinner? Any brief suggestions?\n\nAssistant: <think>\n</think>\n"],
  "max_tokens": '$MAX_TOKENS', "stop_tokens": [0, 261, 24281], "session_id": "'$SESSION'"'
post /state/chat/completions "{$TURN, $SAMPLING, \"stream\": true, \"chunk_size\": 128, $LOCK}"
expect "a session, streamed" 200 '^data: \{' '^data: \[DONE\]$'
post /state/chat/completions "{$TURN, $SAMPLING, \"stream\": false, $LOCK}"
expect "the session again, whole" 200 '"choices"'
post /multi_state/chat/completions "{$TURN, \"dialogue_idx\": 0, \"stream\": true, $LOCK}"
expect "a branch, streamed" 200 '"object": ?"multi_state.dialogue_idx"' '"dialogue_idx": ?1' '^data: \[DONE\]$'
post /multi_state/chat/completions "{$TURN, \"dialogue_idx\": 1, $LOCK}"
expect "a branch of the branch, whole" 200 '"dialogue_idx": ?2'
post /state/status "{$LOCK}"
expect "sessions listed" 200 '"status": ?"success"' "$SESSION"
post /state/delete "{\"session_id\": \"$SESSION\", $LOCK}"
expect "session deleted" 200 '"status": ?"success"'
post /state/delete "{\"session_id\": \"${SESSION}\", \"delete_prefix\": true, $LOCK}"
expect "its namesakes deleted" 200 '"deleted": ?[1-9]'
post /state/delete "{\"session_id\": \"$SESSION\", $LOCK}"
expect "no such session any more" 404 '"status": ?"not_found"'

[ "$failures" -eq 0 ] || { echo "$failures examples failed"; exit 1; }
echo "all examples answered"

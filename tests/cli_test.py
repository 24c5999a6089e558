#!/usr/bin/env python3
"""The command line of ds4 from outside: streams, exit codes, options, JSON, dumps, scripts, and the chat in a pseudo-terminal.

    tests/cli_test.py ./ds4 tests/data/nano.gguf [PATTERN]     prints "N passed, M failed"
"""
import csv
import json
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import fcntl
import time
import traceback

DS4, MODEL = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
ENV = {k: v for k, v in os.environ.items() if k not in ("DS4_MODEL", "NO_COLOR", "STY", "TMUX", "XTERM_VERSION")}
ENV["TERM"] = "xterm-256color"
TMP = tempfile.TemporaryDirectory(prefix="ds4-cli-")
ENV["XDG_STATE_HOME"] = os.path.join(TMP.name, "state")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GREEDY = ["--nothink", "--temp", "0"]


class Result:
    def __init__(self, code, out, err):
        self.code, self.raw, self.out, self.err = code, out, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def ds4(*args, stdin=None, model=MODEL, env=None, cwd=None, timeout=60):
    cmd = [DS4] + (["-m", model] if model else []) + list(args)
    p = subprocess.run(cmd, input=stdin if stdin is not None else b"", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(ENV, **(env or {})),
                       cwd=cwd or TMP.name, timeout=timeout)
    return Result(p.returncode, p.stdout, p.stderr)


def path(name, data=None):
    p = os.path.join(TMP.name, name)
    if data is not None:
        with open(p, "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode())
    return p


def same(got, want, what=""):
    assert got == want, "%s\n   got  %r\n   want %r" % (what, got, want)


def holds(needle, text):
    assert needle in text, "%r is not in %r" % (needle, text)


def fails(r, code, *needles):
    same(r.code, code, r.err)
    same(r.out, "", "stdout of a failed run")
    lines = r.err.strip().split("\n")
    same(len(lines), 1, "one line: " + r.err)
    assert lines[0].startswith("ds4: "), r.err
    for n in needles:
        holds(n, r.err)


# -- one-shot ----

def test_answer_is_all_of_stdout():
    r = ds4(*GREEDY, "-p", "Hello")
    same((r.code, r.out, r.err), (0, "Hello! How can I help you today?\n", ""))


def test_prompt_sources():
    want = "Hello! How can I help you today?\n"
    same(ds4(*GREEDY, "-f", path("hello.txt", "Hello")).out, want)
    same(ds4(*GREEDY, "-f", "-", stdin=b"Hello").out, want)
    ids = [ds4("--dump-tokens", *args, stdin=text).out for args in ([], ["--raw"]) for text in (b"Hello", b"Hello\n", b"Hello\n\n")]
    same([ids[0] == ids[1], ids[1] == ids[2], ids[3] == ids[4]], [True, False, False])       # the end of the last line is not asked
    same(ds4(*GREEDY, stdin=b"Hello").out, want)
    same(ds4(*GREEDY, "--prompt=Hello", stdin=b"not read").out, want)
    for text in (b"Hello\n", b"Hello\r\n", b"\xef\xbb\xbfHello"):                             # files of any editor
        same(ds4("--dump-tokens", "-f", path("text", text)).out, ds4("--dump-tokens", "-p", "Hello").out, repr(text))
        same(ds4("--dump-tokens", "-p", "x", "-sysf", path("text", text)).out, ds4("--dump-tokens", "-p", "x", "-sys", "Hello").out, repr(text))
    both = json.loads(ds4("--dump-tokens", "--nothink", "-p", "A", "-f", "-", stdin=b"B").out)
    same(both, json.loads(ds4("--dump-tokens", "--nothink", "-p", "A\n\nB").out))
    ids = json.loads(ds4("--dump-tokens", "--nothink", "-p", "Hello").out)
    same(ds4("--temp", "0", "--prompt-tokens", path("ids.json", json.dumps(ids))).out, want)
    same(ds4("--temp", "0", "--prompt-tokens", path("ids.txt", " ".join(map(str, ids)) + "\n")).out, want)
    same(ds4(*GREEDY, "--messages", path("m.json", '[{"role": "user", "content": "Hello"}]')).out, want)


def test_an_assistants_text_at_the_end_is_continued():
    def ask(messages, *args):
        return ds4("--temp", "0", "--messages", path("prefill.json", json.dumps(messages)), *args)
    hello, begun = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello! How can"}
    for mode in ("--nothink", "--think"):
        r = ask([hello, begun], mode)
        same((r.code, r.out, r.err), (0, " I help you today?\n", ""))
    same(ask([{"role": "user", "content": "What is 12 + 7?"}, {"role": "assistant", "reasoning_content": "12 + 7 = 19.", "content": ""}]).out, "19\n")
    whole = json.loads(ds4("--dump-tokens", "--nothink", "-p", "Hello").out)
    same(json.loads(ask([hello, begun], "--nothink", "--dump-tokens").out)[:len(whole)], whole)
    f = path("prefill.jsonl", json.dumps({"messages": [hello, begun], "text": " I help you today?"}))
    same(ds4("--script", f).code, 0)
    fails(ask([hello, {"role": "assistant", "tool_calls": [{"name": "f"}]}]), 1, "prefill.json[1]: the last message is of role assistant, expected the results of its calls")
    fails(ask([{"role": "system", "content": "x"}], "-sys", "y"), 1, "prefill.json[0]: the last message is of role system, expected a message to answer")
    fails(ask([], "-sys", "y"), 1, "prefill.json: no messages")


def test_reasoning_goes_to_stderr():
    r = ds4("--temp", "0", "-p", "What is 12 + 7?")
    same((r.code, r.out), (0, "19\n"))
    assert r.err.strip() and "\x1b" not in r.err, r.err
    same(ds4("--temp", "0", "-q", "-p", "What is 12 + 7?").err, "")
    same(ds4("--temp", "0", "--hide-think", "-p", "What is 12 + 7?").err, "")
    j = json.loads(ds4("--temp", "0", "--json", "-p", "What is 12 + 7?").out)
    same(j["text"], "19")
    same(j["reasoning"].strip(), r.err.strip())


def test_stats_line():
    r = ds4(*GREEDY, "--stats", "-p", "Hello")
    assert re.fullmatch(r"prompt 5 tok [\d.]+ t/s \| answer 10 tok [\d.]+ t/s [\d.]+ GB/s \| ctx 15/\d+ \| #[0-9a-f]{8}\n", r.err), r.err
    same(ds4(*GREEDY, "--stats", "-q", "-p", "Hello").err, "")


def test_json():
    r = ds4(*GREEDY, "--json", "--seed", "7", "--logprobs", "3", "-p", "Hello")
    j = json.loads(r.out)
    same(list(j), ["text", "finish", "prompt_tokens", "cached_tokens", "completion_tokens", "prompt_ms", "completion_ms", "seed", "hash", "logprobs"])
    same((j["text"], j["finish"], j["prompt_tokens"], j["cached_tokens"], j["completion_tokens"], j["seed"]), ("Hello! How can I help you today?", "stop", 5, 0, 10, 7))
    same(len(j["logprobs"]), 10)
    for t in j["logprobs"]:
        same(len(t["top"]), 3)
        same(t["top"][0]["id"], t["id"])
        assert t["top"][0]["logprob"] >= t["top"][1]["logprob"] >= t["top"][2]["logprob"] and t["logprob"] <= 0
    same("".join(t["text"] for t in j["logprobs"][:-1]), j["text"])


def test_hash_does_not_depend_on_how_it_runs():
    prompt = ["-p", "What is the capital of France?"]
    want = json.loads(ds4(*GREEDY, "--json", *prompt).out)["hash"]
    for args in (["-t", "1"], ["-t", "2"], ["--isa", "scalar"], ["--prefill-chunk", "1"], ["--prefill-chunk", "3"], ["--no-mmap"], ["--warm-weights"]):
        same(json.loads(ds4(*GREEDY, "--json", *args, *prompt).out)["hash"], want, str(args))


def test_finish_reasons():
    def finish(*args):
        j = json.loads(ds4(*GREEDY, "--json", *args).out)
        return j["finish"], j["text"]
    same(finish("-n", "3", "-p", "Hello")[0], "length")
    same(finish("--stop", " I help", "-p", "Hello"), ("stop-text", "Hello! How can"))
    same(finish("--stop", "nowhere", "--stop", "!", "-p", "Hello"), ("stop-text", "Hello"))
    same(finish("--stop", "today?!", "-p", "Hello"), ("stop", "Hello! How can I help you today?"))
    same(finish("--ctx", "8", "-p", "Hello")[0], "context")
    same(ds4(*GREEDY, "--ignore-eos", "-n", "20", "--json", "-p", "Hello").out.count('"length"'), 1)
    r = ds4(*GREEDY, "--ctx", "8", "-p", "Hello")
    holds("of 8", r.err)
    same(r.code, 0)


def test_the_end_by_length_is_announced():
    r = ds4(*GREEDY, "-n", "3", "-p", "Hello")
    same((r.code, r.out, r.err), (0, "Hello! How\n", "ds4: stopped after 3 tokens (-n)\n"))
    same(ds4(*GREEDY, "-n", "1", "-p", "Hello").err, "ds4: stopped after 1 token (-n)\n")
    same(ds4(*GREEDY, "-n", "10", "-p", "Hello").err, "")          # the tenth is the end of the turn
    for args in (["-q"], ["--json"]):                              # JSON says it itself
        same(ds4(*GREEDY, "-n", "3", *args, "-p", "Hello").err, "")
    c = Chat(*OPTIONS, "-n", "3")
    c.prompt()
    holds("Hello! How\r\nds4: stopped after 3 tokens (-n)\r\n", c.say("Hello"))
    c.send("\x04")
    same(c.end(), 0)


def test_loop_stop():
    j = json.loads(ds4("--raw", "--temp", "0", "--ignore-eos", "-n", "2000", "--loop-stop", "3", "--json", "-p", "Hello").out)
    assert j["finish"] in ("loop", "length"), j["finish"]
    if j["finish"] == "loop":
        assert j["completion_tokens"] < 2000


def test_seeds():
    args = ["--nothink", "--temp", "3", "--min-p", "0", "-n", "12", "--json", "-p", "Tell me a story about a fox."]
    a, b, c = (json.loads(ds4(*args, "--seed", s).out) for s in ("0", "0", "1"))
    same(a["text"], b["text"])
    same(a["hash"], b["hash"])
    assert a["text"] != c["text"]
    assert json.loads(ds4(*args).out)["seed"] != json.loads(ds4(*args).out)["seed"]


def test_sampling_edges():
    for args in (["--temp", "1", "--top-k", "1"], ["--temp", "1", "--top-p", "0"], ["--temp", "0"], ["--temp", "1", "--min-p", "1"]):
        same(ds4("--nothink", *args, "-p", "Hello").out, "Hello! How can I help you today?\n", str(args))
    same(ds4("--nothink", "--temp", "1", "--top-k", "1", "--samplers", "top-k,temp", "-p", "Hello").code, 0)
    same(ds4(*GREEDY, "--repeat-penalty", "1.3", "--repeat-last-n", "-1", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "-p", "Hello").code, 0)


def test_tools_are_rendered_and_parsed():
    tools = path("tools.json", json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]))
    with_tools = json.loads(ds4("--dump-tokens", "--nothink", "--tools", tools, "-p", "Hello").out)
    assert len(with_tools) > 100
    same(ds4(*GREEDY, "-n", "5", "--tools", tools, "--json", "-p", "Hello").code, 0)
    fails(ds4("--tools", path("bad.json", "{"), "-p", "x"), 1, "bad.json")
    fails(ds4("--tools", path("bad2.json", "{}"), "-p", "x"), 1, "bad2.json")
    for bad, needle in (("[{}]", 'bad3.json[0] has no "function"'), ('[{"name": "f"}, 3]', "bad3.json[1] must be an object"),
                        ('[{"function": "f"}]', 'bad3.json[0]: "function" must be an object')):
        fails(ds4("--tools", path("bad3.json", bad), "-p", "x"), 1, needle)
    fails(ds4("-sys", "s", "--tools", tools, "--messages", path("roles.json", '[{"role": 1}]')), 1, 'roles.json[0]: "role" must be')


# -- bad input and bad usage ----

def test_dumps_to_stdout():
    same(json.loads(ds4(*GREEDY, "-p", "Hello", "-n", "2", "--dump-logprobs", "-").out)["finish"], "length")
    file = path("logits.f32", "")
    same(ds4(*GREEDY, "-p", "Hello", "--dump-logits", file).code, 0)
    p = subprocess.run(["sh", "-c", 'echo before >> all; exec "$@" >> all', "sh", DS4, "-m", MODEL, *GREEDY, "-p", "Hello", "--dump-logits", "-"], cwd=os.path.dirname(file),
                       stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    same(p.returncode, 0)
    with open(file, "rb") as f, open(os.path.join(os.path.dirname(file), "all"), "rb") as g:
        assert g.read() == b"before\n" + f.read()


def test_bad_usage():
    for args, needle in ((["-n", "abc"], "abc"), (["-n", "0"], "-n"), (["--nonsense"], "--nonsense"), (["--temp", "-1"], "--temp"), (["--temp", "nan"], "--temp"),
                         (["--top-p", "1.5"], "--top-p"), (["--min-p=x"], "--min-p"), (["--samplers", "temp,foo"], "foo"), (["--ctx", "0"], "--ctx"), (["-n"], "-n"),
                         (["--isa", "mmx"], "mmx"), (["--json=yes"], "--json"), (["--color", "blue"], "blue"), (["hello"], "hello"), (["--inspect", "--check"], "--check"),
                         (["--stop", ""], "--stop"), (["-p", ""], "empty"), (["--bench", "gpu"], "gpu"), (["--threads", "99999"], "--threads"), (["--raw", "-p", ""], "empty")):
        fails(ds4(*args), 2, needle)
    fails(ds4(stdin=b""), 2, "empty")
    fails(ds4("two\nlines"), 2, "'two\\x0alines' is no option")
    for option in ("-m", "-f", "--prompt-tokens", "--messages", "-sysf", "--tools", "--script", "--dump-logits", "--dump-logprobs", "--perplexity-file", "--dump-taps"):
        fails(ds4(option, ""), 2, option + ": the name (")
    for args in (["-sysf", "-"], ["-sysf", "-", "-f", "-"], ["--tools", "-", "--messages", "-"]):
        fails(ds4(*args, stdin=b"[]"), 2, "standard input is wanted twice")


def test_options_that_need_another():
    for args, *needles in ((["--logprobs", "3", "-p", "Hello"], "--logprobs needs --json or --dump-logprobs"), (["--no-bos", "-p", "Hello"], "--no-bos needs --raw"),
                           (["--no-special", "--dump-tokens", "-p", "Hello"], "--no-special needs --raw"), (["--update", "-p", "Hello"], "--update needs --script")):
        fails(ds4(*args), 2, *needles)
    f = path("one.jsonl", '{"prompt": "Hello", "n": 1}\n')
    fails(ds4("--script", "-", "--update"), 2, "--update needs a script in a file")
    texts = [["-sys", "x"], ["-sysf", f], ["--tools", f]]
    prompts = [["-p", "Hello"], ["--prompt", "Hello"], ["-f", f], ["--messages", f]]
    for whole, others, why in ((["--script", f], [["--raw"], ["--prompt-tokens", f], *prompts, *texts], "--script: a script has its own prompts"),
                               (["--prompt-tokens", f], [["--raw"], *prompts, *texts], "--prompt-tokens: the ids are the whole prompt"),
                               (["--raw", "-p", "Hello"], [prompts[-1], *texts], "--raw: there is no chat template to put it in")):
        for other in others:
            fails(ds4(*whole, *other), 2, why)
    r = ds4("--script", f, "--json", "--logprobs", "1")
    same((r.code, len(json.loads(r.out)["logprobs"])), (0, 1))
    same(ds4("--help", "--update", "--no-bos", model=None).code, 0)


def test_nothing_is_lost_in_silence():
    f = path("once", "x")
    texts = [["-p", "x"], ["-f", f], ["--prompt-tokens", f], ["--messages", f], ["-sys", "x"], ["-sysf", f], ["--tools", f]]
    for text in texts:
        fails(ds4(*text, *text), 2, text[0] + " is given twice, expected once")
        for command in (["--inspect"], ["--check"], ["--perplexity-file", f], ["--bench", "model"], ["--bench", "sampler"]):
            fails(ds4(*command, *text), 2, text[0] + " and " + command[0] + ": ")
    fails(ds4("--bench", "tokenizer", "-p", "x"), 2, "-p and --bench: no prompt is read")
    fails(ds4("-p", "x", "-sys", "a", "-sysf", f), 2, "-sys and -sysf: there is one system prompt")
    for dump in (["--dump-tokens"], ["--dump-logits", f], ["--dump-logprobs", f], ["--dump-taps", f]):
        fails(ds4("-p", "x", "--json", *dump), 2, "--json and " + dump[0] + ": a dump has its own format")
        fails(ds4("-p", "x", *dump, *dump), 2, dump[0] + ": only one of --script")
    fails(ds4("-p", "x", "--effort", "low", "--think-max"), 2, "--effort and --think-max: ")
    for args in (["--help", "--inspect"], ["--inspect", "--help", "-p", "x", "-p", "y"]):
        same(ds4(*args).out[:13], "ds4 [options]")


def test_the_last_of_two_settings_counts():
    hello, sum_ = "Hello! How can I help you today?\n", ["--temp", "0", "-p", "What is 12 + 7?"]
    same(ds4("--temp", "5", "--temp", "0", "-n", "2", "-n", "20", "--think", "--nothink", "-p", "Hello").out, hello)
    assert ds4("--nothink", "--think", *sum_).err and not ds4("--think", "--nothink", *sum_).err
    for args, stats, times in ((["-q", "--stats"], 1, 0), (["--stats", "-q"], 0, 0), (["--stats", "--no-stats"], 0, 0), (["--no-stats", "--stats"], 1, 0), (["-q", "-v"], 0, 1), (["-v", "-q"], 0, 0)):
        err = ds4(*args, *sum_).err
        same((" GB/s | ctx" in err, " ms\n" in err), (bool(stats), bool(times)), str(args) + err)
    assert "reasoning" not in json.loads(ds4("--json", "--hide-think", *sum_).out)
    for args, thinks in (([], [False, True]), (["--think"], [True, True]), (["--nothink"], [False, False]), (["--nothink", "--think"], [True, True])):
        _, out, _ = script([{"prompt": "Hello", "n": 2, "think": think} for think in (False, True)], *args)
        same(["reasoning" in o for o in out], thinks, str(args))


def test_bad_input():
    fails(ds4("-p", "x", model=path("missing.gguf")), 1, "missing.gguf")
    fails(ds4("-p", "x", model=path("empty.gguf", b"")), 1, "empty.gguf")
    fails(ds4("-p", "x", model=path("page.gguf", "<!DOCTYPE html><html>Not found</html>" * 100)), 1, "page.gguf")
    with open(MODEL, "rb") as f:
        data = f.read()
    fails(ds4("-p", "x", model=path("short.gguf", data[:len(data) // 2])), 1, "short.gguf")
    fails(ds4("-p", "x", model=path("other.gguf", data.replace(b"deepseek4", b"deepseek2"))), 1, "deepseek2")
    fails(ds4("-p", "x", model=path("tensor.gguf", data.replace(b"output_norm.weight", b"output_nerm.weight"))), 1, "output_norm.weight")
    fails(ds4("-p", "x", model=TMP.name), 1, TMP.name)
    fails(ds4("-f", path("nothing.txt")), 1, "nothing.txt")
    fails(ds4("--prompt-tokens", path("ids", "1 2 x")), 1, "ids: token 2", '"x"')
    fails(ds4("--prompt-tokens", path("ids", "[1, 99999999]")), 1, "99999999")
    fails(ds4("--messages", path("messages", "[{]")), 1, "messages", "offset 2")
    fails(ds4("--messages", path("messages", '[{"role": "king", "content": "x"}]')), 1, "king")
    fails(ds4("--messages", path("messages", '[{"role": 1}]'), "--tools", path("tools", "[]")), 1, '"role" must be a string, found 1', "messages[")
    fails(ds4("--ctx", "16", "-p", "word " * 100), 1, "16")
    fails(ds4("--dump-logits", "/nowhere/x", "-p", "x"), 1, "/nowhere/x")


def test_warnings_are_one_line():
    with open(MODEL, "rb") as f:
        r = ds4("--dump-tokens", "-p", "x", model=path("\x1b[31m\nred.gguf", f.read().replace(b"ggml.token_type", b"ggml.token_typx")))
    holds("\\x1b[31m\\x0ared.gguf: no tokenizer.ggml.token_type", r.err)
    same((r.code, r.err.count("\n"), r.err.count("\x1b")), (0, 1, 0))
    r = ds4("--script", path("names.jsonl", '{"name": "a\\nb", "prompt": "Hello", "n": 1, "text": ""}\n'))
    same((r.code, r.err.split("\n")[1:]), (3, ["0 passed, 1 failed", ""]))


def test_no_model():
    r = ds4("-p", "x", model=None)
    fails(r, 1, "-m", "DS4_MODEL", "ds4flash.gguf", "make demo")
    fails(ds4(model=None), 1, "no model")           # rather than the empty stdin
    same(ds4(*GREEDY, "-p", "Hello", model=None, env={"DS4_MODEL": MODEL}).out, "Hello! How can I help you today?\n")
    os.symlink(MODEL, path("ds4flash.gguf"))
    same(ds4(*GREEDY, "-p", "Hello", model=None).out, "Hello! How can I help you today?\n")
    os.unlink(path("ds4flash.gguf"))


def test_help_and_version():
    r = ds4("--help", model=None)
    same((r.code, r.err), (0, ""))
    for option in ("-m, --model FILE", "--temp F", "--script FILE", "--bench [WHAT]", "--json"):
        holds(option, r.out)
    same(ds4("-h", model=None).out, r.out)
    assert max(map(len, r.out.split("\n"))) < 132
    v = ds4("--version", model=None)
    assert re.match(r"ds4 \d+\.\d+\.\d+.*scalar", v.out), v.out


def test_readme_lists_the_options():
    text = ds4("--help", model=None).out
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        holds(text[text.index("Model and machine"):text.index("\n\nExit codes")], f.read())


def test_demo_on_a_pipe():
    r = ds4("--demo", stdin=b"What is 12 + 7?")
    same((r.code, r.out), (0, "19\n"))


def test_broken_pipe_ends_quietly():
    p = subprocess.Popen([DS4, "-m", MODEL, *GREEDY, "--ignore-eos", "-n", "3000", "-p", "Hello"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    p.stdout.read(1)
    p.stdout.close()
    err = p.stderr.read()
    same((p.wait(20), err), (0, b""))


def test_dump_without_a_reader_is_an_error():
    fifo, texts = path("fifo"), path("gone.jsonl", '{"prompt": "Hello", "n": 1}\n' * 2)
    os.mkfifo(fifo)
    for args in (["--dump-tokens", "-p", "Hello"], ["--dump-logits", "-", "-p", "Hello"], ["--dump-logprobs", "-", "-p", "Hello"], ["--script", texts]):
        r, w = os.pipe()
        os.close(r)
        p = subprocess.run([DS4, "-m", MODEL, *GREEDY, *args], stdin=subprocess.DEVNULL, stdout=w, stderr=subprocess.PIPE, env=ENV)
        os.close(w)
        same((p.returncode, p.stderr), (1, b"ds4: standard output: Broken pipe\n"), str(args))
    for args in (["--dump-logits", fifo], ["--dump-logprobs", fifo, "-n", "20"]):
        p = subprocess.Popen([DS4, "-m", MODEL, *GREEDY, *args, "-p", "Hello " * 50], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENV)
        os.close(os.open(fifo, os.O_RDONLY))
        same((p.stderr.read(), p.wait(60)), (("ds4: %s: Broken pipe\n" % fifo).encode(), 1))


def test_full_disk_is_an_error():
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            p = subprocess.run([DS4, "-m", MODEL, *GREEDY, "-p", "Hello"], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, env=ENV)
        same(p.returncode, 1)
        holds(b"ds4: ", p.stderr)


def test_closed_streams():
    """A stream closed by the caller is an error when it is needed, and no file of ours takes its place."""
    def closed(redirection, *args):
        p = subprocess.run(["sh", "-c", 'exec "$@" ' + redirection, "sh", DS4, "-m", MODEL, *GREEDY, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, env=ENV, cwd=TMP.name, timeout=60)
        return Result(p.returncode, p.stdout, p.stderr)
    fails(closed("<&-"), 1, "standard input")
    same(closed("<&-", "-p", "Hello").out, "Hello! How can I help you today?\n")
    fails(closed(">&-", "-p", "Hello"), 1, "standard output")
    same(closed("2>&-", "-p", "Hello").out, "Hello! How can I help you today?\n")
    r = closed("<&- >&- 2>&-", "-p", "Hello", "--dump-logits", "closed.f32")
    same((r.code, r.out, r.err), (0, "", ""))
    same(ds4("-p", "Hello", "--nothink", "--dump-logits", "open.f32").code, 0)
    with open(path("closed.f32"), "rb") as a, open(path("open.f32"), "rb") as b:
        assert a.read() == b.read()


def test_interrupt():
    p = subprocess.Popen([DS4, "-m", MODEL, *GREEDY, "--json", "--ignore-eos", "-n", "3900", "-p", "Hello"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    time.sleep(1.0)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=20)
    if p.returncode != 0:                     # 0: a machine so fast that it was done
        same((p.returncode, json.loads(out)["finish"]), (130, "interrupted"))


def test_interrupt_while_a_fifo_has_no_reader():
    fifo = path("unread.fifo")
    os.mkfifo(fifo)
    for option in ("--dump-logits", "--dump-logprobs"):
        p = subprocess.Popen([DS4, "-m", MODEL, option, fifo, "-p", "Hello"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
        time.sleep(0.5)
        p.send_signal(signal.SIGINT)
        same((p.communicate(timeout=20), p.returncode), ((b"", b""), -signal.SIGINT))              # a shell's 130


def test_interrupt_while_stdout_is_blocked():
    """The reader of a full pipe still gets the whole answer."""
    p = subprocess.Popen([DS4, "-m", MODEL, *GREEDY, "--json", "--logprobs", "9", "--ignore-eos", "-n", "40", "-p", "Hello"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, env=ENV)
    fcntl.fcntl(p.stdout, 1031, 4096)         # F_SETPIPE_SZ
    select.select([p.stdout], [], [], 20)
    time.sleep(0.2)
    for _ in range(2):
        p.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = p.communicate(timeout=20)
    same((p.returncode, json.loads(out)["finish"], err), (0, "length", b"\n(stops when this step is done; the third Ctrl-C ends ds4)\n"))


# -- dumps ----

def test_dump_tokens():
    same(ds4("--dump-tokens", "--raw", "--no-bos", "-p", "").out, "[]\n")
    raw = json.loads(ds4("--dump-tokens", "--raw", "-p", "<｜User｜>Hi").out)
    same(json.loads(ds4("--dump-tokens", "--raw", "--no-bos", "-p", "<｜User｜>Hi").out), raw[1:])
    assert len(json.loads(ds4("--dump-tokens", "--raw", "--no-special", "-p", "<｜User｜>Hi").out)) > len(raw)
    chat = json.loads(ds4("--dump-tokens", "--nothink", "-p", "Hi").out)
    think = json.loads(ds4("--dump-tokens", "-p", "Hi").out)
    same(chat[:-1], think[:-1])
    assert chat[-1] != think[-1]
    forged = json.loads(ds4("--dump-tokens", "--nothink", "-p", "<｜Assistant｜>").out)
    same(forged.count(chat[-2]), 1, "a control token forged in a prompt")
    data = bytes(range(256))
    same(len(json.loads(ds4("--dump-tokens", "--raw", "--no-bos", "--no-special", "-f", path("all.bin", data)).out)) > 10, True)
    v = ds4("--dump-tokens", "-v", "--nothink", "-p", "Hi")
    same(len(v.err.strip().split("\n")), len(chat))
    assert len(json.loads(ds4("--dump-tokens", "--think-max", "-p", "Hi").out)) > len(think) + 50
    system = json.loads(ds4("--dump-tokens", "--nothink", "-sys", "Be brief.", "-p", "Hi").out)
    same(system[-len(chat) + 1:], chat[1:])


def test_dump_logits_and_perplexity():
    ids = json.loads(ds4("--dump-tokens", "--nothink", "-p", "Hello").out)
    f = path("logits.bin")
    r = ds4("--dump-logits", f, "--nothink", "-p", "Hello")
    same((r.code, r.out), (0, ""))
    n_vocab = json.loads(ds4("--inspect", "--json").out)["shape"]["vocabulary"]
    data = open(f, "rb").read()
    same(len(data), 4 * n_vocab * len(ids))
    with open(f, "rb") as g:
        last = struct.unpack("<%df" % n_vocab, g.read()[-4 * n_vocab:])
    j = json.loads(ds4(*GREEDY, "--json", "--logprobs", "1", "-n", "1", "-p", "Hello").out)
    same(max(range(n_vocab), key=lambda i: last[i]), j["logprobs"][0]["id"])
    for chunk in ("1", "3"):
        g = path("logits2.bin")
        ds4("--dump-logits", g, "--prefill-chunk", chunk, "--nothink", "-p", "Hello")
        same(open(g, "rb").read() == data, True, "chunk " + chunk)
    p = json.loads(ds4("--perplexity-file", path("text", "Hello! How can I help you today? " * 8), "--ctx", "32").out)
    assert p["tokens"] > 60 and p["nll"] > 0, p
    assert abs(p["perplexity"] / 2.718281828459045 ** (p["nll"] / p["tokens"]) - 1) < 1e-9, p


def test_dump_logprobs():
    f = path("lp.json")
    same(ds4(*GREEDY, "--dump-logprobs", f, "--logprobs", "2", "-p", "Hello").out, "")
    j = json.load(open(f))
    same((j["finish"], len(j["tokens"]), len(j["tokens"][0]["top"])), ("stop", 10, 2))
    os.symlink("/dev/stdout", path("lp.link"))
    r = ds4("--dump-logprobs", path("lp.link"), "--nothink", "-p", "Hello", "--seed", "1", "-n", "2")
    j = json.loads(r.out)
    same((list(j), j["seed"], len(j["tokens"][0]["top"])), (["finish", "seed", "hash", "tokens"], 1, 10))
    same(os.path.islink(path("lp.link")), True, "written to, not replaced")
    fails(ds4("--dump-logprobs", "/nowhere/x", "-p", "x"), 1, "/nowhere/x")


def test_dump_taps():
    d = path("taps")
    r = ds4("--dump-taps", d, "--nothink", "-p", "Hello")
    same((r.code, r.out), (0, ""))
    names = os.listdir(d)
    for n in ("hc_embed.f32", "l0.hc_after_attn.f32", "l0.hc_out.f32", "l0.experts.i32"):
        assert n in names, names
    same(os.path.getsize(os.path.join(d, "hc_embed.f32")), 5 * 4 * 128 * 4)
    same(os.path.getsize(os.path.join(d, "l5.hc_out.f32")), 5 * 4 * 128 * 4)


def test_inspect_and_check():
    r = ds4("--inspect", "--ctx", "1000")
    for needle in ("layers", "Q8_0", "weights per token", "--ctx 1000", "cache"):
        holds(needle, r.out)
    holds("MB, mapped", r.out)
    holds("MB in 1 file\n", r.out)
    assert " 1 tensor " in r.out and " 1 tensors" not in r.out, r.out
    holds("MB, read", ds4("--inspect", "--no-mmap").out)
    j = json.loads(ds4("--inspect", "--json", "--ctx", "1000").out)
    same((j["shape"]["layers"], j["tokenizer"]["tokens"], j["memory"]["ctx"]), (6, 1536, 1000))
    same(sum(t["bytes"] for t in j["types"]) <= j["file_bytes"], True)
    c = json.loads(ds4("--check").out)
    same(c["non_finite"], 0)
    with open(MODEL, "rb") as f:
        data = bytearray(f.read())
    data[-4000:-3998] = b"\x00\x7c"            # somewhere in the last tensors: most likely an infinity or a quantised value
    bad = ds4("--check", model=path("bad.gguf", bytes(data)))
    assert bad.code in (0, 1)


def test_inspect_knows_no_type_of_an_unread_tensor():
    with open(MODEL, "rb") as f:
        data = f.read()
    name, unread = b"blk.5.attn_norm.weight", b"blk.5.nextn.one.weight"      # makes the last block one of multi-token prediction
    at = data.index(name) + len(name) + 4 + 8                                # after its one dimension
    model = path("mtp.gguf", data[:at] + struct.pack("<I", 41) + data[at + 4:])
    fails(ds4("--inspect", model=model), 1, "blk.5.attn_norm.weight has unknown type 41")
    model = path("mtp.gguf", data[:at].replace(name, unread) + struct.pack("<I", 41) + data[at + 4:])
    j = json.loads(ds4("--inspect", "--json", model=model).out)
    same(j["shape"]["layers"], 5)
    assert {"role": "MTP, unused", "type": "type 41", "tensors": 1, "bytes": 0} in j["types"], j["types"]


def test_a_context_too_small_says_what_helps():
    fails(ds4("-p", "Hello", "-c", "4"), 1, "more than the context of 4; --ctx, in a chat /ctx, allows up to 4096")
    r = ds4("-p", "Hello", "-c", "5", "--temp", "0")
    assert r.code == 0 and "the context of 5 tokens is full, 5 of them the prompt's; --ctx" in r.err, r
    fails(ds4("-p", "Hello " * 5000), 1, "the model has no larger one")


def test_bench_output():
    r = ds4("--bench", "sampler", timeout=120)
    same(r.code, 0)
    rows = r.out.strip().split("\n")
    assert rows[0].startswith("chain,vocabulary,us") and len(rows) > 8, r.out
    j = json.loads(ds4("--bench", "model", "--ctx", "200", "--json", "-q").out)
    same(j["bench"], "model")
    assert {"threads", "isa", "file", "hash", "rows"} <= set(j), j
    assert any(row["what"] == "decode" for row in j["rows"])
    same(ds4("--bench", "profile", "--ctx", "100").code, 0)
    r = ds4("--bench", "profile", "--ctx", "1", "--json")
    same(json.loads(r.out)["rows"][0]["prefill_ms"], None)
    version = ds4("--version", model=None).out
    for isa in ("avx512", "neon"):
        if isa not in version:
            fails(ds4("--bench", "kernels", "--isa", isa, model=None), 2, "--isa " + isa)
    model = path('a "b", c.gguf')
    os.symlink(MODEL, model)
    same(list(csv.DictReader(ds4("--bench", "tokenizer", model=model).out.splitlines()))[0]["file"], model)
    r = ds4("--bench", "memory", "-t", "1", timeout=120)
    assert r.code == 0 and r.out.startswith("of,threads,GB/s") and "buffer,1," in r.out, r
    assert ("weights,1," in r.out) != ("fit into the last cache" in r.err), r
    same(ds4("--bench", "tokenizer", "-f", path("t.txt", "Hello world. " * 1000)).code, 0)


# -- scripts ----

def script(cases, *args):
    f = path("script.jsonl", "\n".join(json.dumps(c) for c in cases) + "\n")
    r = ds4("--script", f, *args)
    return r, [json.loads(line) for line in r.out.strip().split("\n") if line], f


def test_script():
    hello = {"name": "hello", "prompt": "Hello", "text": "Hello! How can I help you today?", "finish": "stop"}
    facts = {"name": "facts", "prompt": "Bob was assigned the number thirty-four. Alice was assigned the number fifty-two.\n\nList the assigned numbers for: Alice, Bob.",
             "facts": {"Alice": "52", "Bob": 34}, "contains": ["Alice", "34"]}
    r, out, _ = script([hello, facts])
    same((r.code, r.err.strip().split("\n")[-1]), (0, "2 passed, 0 failed"))
    same([o["pass"] for o in out], [True, True])
    for key in ("name", "pass", "text", "finish", "hash", "tokens_out", "margin", "cached_tokens"):
        assert key in out[0], out[0]
    wrong = [dict(hello, text="Hello! How can I harm you?"), dict(hello, finish="length"), dict(hello, hash="00000000"), dict(facts, facts={"Alice": "53"}),
             dict(facts, facts={"Carol": "1"}), dict(hello, contains=["nowhere"]), dict(hello, tokens_out=[1, 2, 3])]
    r, out, _ = script(wrong, "-q")
    same((r.code, r.err), (3, "0 passed, 7 failed\n"))
    for o, needle in zip(out, ("at byte 18", "finish", "hash", "Alice", "missing", "nowhere", "tokens_out[0]")):
        holds(needle, o["why"])
    holds("margin there", out[6]["why"])
    holds("below", out[6]["why"])


def test_readme_describes_scripts():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        text = re.search(r"^### Scripts\n(.*?)^## ", f.read(), re.M | re.S).group(1)
    r, out, _ = script([json.loads(line) for line in re.search(r"```\n(.*?)```", text, re.S).group(1).splitlines()])
    same((r.code, [o["pass"] for o in out]), (0, [True] * 3))
    with open(os.path.join(ROOT, "ds4.cpp"), encoding="utf-8") as f:
        keys = re.search(r"kKeys\[\] = \{(.*?)\}", f.read(), re.S).group(1)
    same(set(re.findall(r'"(\w+)"', keys)) - set(re.findall(r"`(\w+)`", text)), set(), "keys that are not described")


def test_script_facts_are_lines():
    story = "Bob was assigned the number thirty-four. Alice was assigned the number fifty-two.\n\nList the assigned numbers for: Alice, Bob."
    r, out, _ = script([{"prompt": story, "facts": {"Alice": 52}}, {"prompt": story, "facts": {"Alice": 5}}, {"prompt": story, "facts": {"lice": 52}}])
    same(out[0]["text"].split("\n"), ["Alice=52", "Bob=34"])
    same([o["pass"] for o in out], [True, False, False])
    same(out[1]["why"], "facts: Alice=52, expected one line Alice=5")


def test_script_reuses_the_prefix():
    a = [{"role": "user", "content": "My name is Clara."}]
    r, out, _ = script([{"messages": a}, {"messages": a}, {"prompt": "My name is Clara. Hello", "n": 1}])
    same(out[0]["cached_tokens"], 0)
    same(out[1]["cached_tokens"] >= out[1]["prompt_tokens"] - 1, True)
    same(out[1]["hash"], out[0]["hash"])
    assert out[2]["cached_tokens"] > 3


def test_script_options_and_errors():
    r, out, _ = script([{"prompt": "Hello", "n": 2}, {"prompt": "Hello", "stop": "!"}, {"prompt": "Hello", "think": True}, {"prompt": "Hello", "ctx": 9},
                        {"prompt": "Hello", "temp": 1, "seed": 3, "top_k": 1, "system": "x"}])
    same([o["finish"] for o in out][:4], ["length", "stop-text", "stop", "context"])
    assert "reasoning" in out[2]
    r, out, _ = script([{"prompt": "Hello", "n": 50}], "-n", "1")
    same(out[0]["completion_tokens"], 1)
    fails(ds4("--script", path("no.jsonl")), 1, "no.jsonl")
    fails(ds4("--script", path("bad.jsonl", "{\n")), 1, "bad.jsonl: line 1")
    fails(ds4("--script", path("bad.jsonl", "\n{}\n")), 1, "bad.jsonl: line 2", "prompt")
    fails(ds4("--script", path("bad.jsonl", '{"prompt": 3}\n')), 1, "string")
    r = ds4("--script", path("odd.jsonl", '{"prompt": "Hello", "n": 2, "test": "Bye"}\n'))
    assert r.code == 0 and 'line 1: the key "test" is unknown' in r.err, r
    r = ds4("--script", path("escape.jsonl", '{"name": "\\u001b[31mred", "prompt": "Hello", "n": 1, "te\\u001bst": 0}\n'))
    assert r.code == 0 and '(\\x1b[31mred): the key "te\\x1bst" is unknown' in r.err and "\x1b" not in r.err, r.err
    for key, value in (("n", "0"), ("n", "1.5"), ("n", "1e30"), ("top_k", "-1"), ("top_k", "0.5"), ("temp", "-1"), ("temp", "NaN"), ("top_p", "2"), ("min_p", "Infinity")):
        fails(ds4("--script", path("bad.jsonl", '{"prompt": "x", "%s": %s}\n' % (key, value))), 1, "line 1", key)


def test_script_is_checked_before_it_runs():
    good = json.dumps({"prompt": "Hello"})
    for bad, *needles in (('{"prompt": "x" 3}', ", column 16 (offset 37): expected ',' or '}', found '3'"), ('{"prompt": "x"', ": expected ',' or '}', found the end"),
                          ("{}", ': 0 of "prompt", "messages" and "tokens_in", expected one'), ('{"prompt": "x", "messages": []}', ": 2 of"),
                          ('{"tokens_in": [1], "system": "x"}', '"system" beside "tokens_in"'), ('{"tokens_in": [-1]}', '"tokens_in": token 0 is -1'),
                          ('{"prompt": "x", "n": 0}', "\"n\": '0' is not a whole number from 1"), ('{"prompt": "x", "n": "5"}', '"n" must be a number, found "5"'),
                          ('{"prompt": "x", "seed": -1}', '"seed"'), ('{"prompt": "x", "ctx": 0}', '"ctx"'), ('{"prompt": "x", "stop": ["a", ""]}', '"stop": empty text'),
                          ('{"prompt": "x", "text": 1}', '"text" must be a string'), ('{"prompt": "x", "hash": 1}', '"hash" must be a string'),
                          ('{"prompt": "x", "contains": [1]}', '"contains" must be a string'), ('{"prompt": "x", "facts": {"a": true}}', '"facts" must be a number, found true'),
                          ('{"prompt": "x", "tokens_out": 5}', '"tokens_out" must be an array, found 5'), ('{"prompt": "x", "finish": "stopp"}', "\"finish\": 'stopp' is none of stop|")):
        r = ds4("--script", path("late.jsonl", good + "\n\r\n" + bad + "\r\n" + good + "\n"))
        fails(r, 1, "late.jsonl: line 3", *needles)
        same(r.err.count("line "), 1, r.err)
    r = ds4("--script", path("seed.jsonl", '\ufeff{"prompt": "Hello", "n": 2, "temp": 1.0, "seed": 18446744073709551615}'))
    same((r.code, json.loads(r.out)["seed"]), (0, 2**64 - 1))


def test_script_update():
    cases = [{"name": "a", "prompt": "Hello"}, {"name": "b", "prompt": "Hello", "text": "wrong", "tokens_out": [1], "finish": "loop", "contains": ["zzz"]}]
    r, _, f = script(cases, "--update")
    same(r.code, 0)
    updated = [json.loads(line) for line in open(f)]
    same(list(updated[0]), ["name", "prompt", "text", "hash"])
    same((updated[1]["text"], updated[1]["finish"], len(updated[1]["tokens_out"])), ("Hello! How can I help you today?", "stop", 10))
    r = ds4("--script", f)
    same((r.code, r.err.strip().split("\n")[-1]), (0, "2 passed, 0 failed"))
    same([n for n in os.listdir(TMP.name) if n.endswith(".new")], [])
    fails(ds4("--script", path("empty.jsonl", "\n\n")), 1, "empty.jsonl: no cases")
    # a text that can be read, but not be replaced
    p = subprocess.run(["bash", "-c", '"$@" --update --script <(echo \'{"prompt": "Hello"}\')', "bash", DS4, "-m", MODEL], stdin=subprocess.DEVNULL, capture_output=True, env=ENV)
    fails(Result(p.returncode, p.stdout, p.stderr), 1, ".new: ")
    # a case that could not run keeps its line, and the run fails
    r, _, f = script([{"prompt": "Hello", "ctx": 2, "text": "kept"}, {"prompt": "Hello", "text": ""}], "--update")
    same((r.code, r.err.strip().split("\n")[-1]), (3, "0 passed, 2 failed"))
    same([json.loads(line)["text"] for line in open(f)], ["kept", "Hello! How can I help you today?"])


# -- chat in a pseudo-terminal ----

class Chat:
    def __init__(self, *args, env=None, size=(24, 80), model=MODEL, limit=None):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            if limit:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            os.chdir(TMP.name)
            os.execve(DS4, [DS4] + (["-m", model] if model else []) + list(args), dict(ENV, **(env or {})))
        self.resize(*size)
        self.seen = ""

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, timeout):
        if select.select([self.fd], [], [], timeout)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                data = b""
            self.seen += data.decode("utf-8", "replace")
            return bool(data)
        return None

    def expect(self, pattern, timeout=20):
        """waits for the pattern and returns what came up to its end"""
        end = time.time() + timeout
        while True:
            m = re.search(pattern, self.seen)
            if m:
                got, self.seen = self.seen[:m.end()], self.seen[m.end():]
                return got
            if time.time() > end or self.read(0.2) is False:
                raise AssertionError("no %r in %r" % (pattern, self.seen[-2000:]))

    def send(self, text):
        os.write(self.fd, text if isinstance(text, bytes) else text.encode())

    def say(self, text):
        """types a line at the prompt and returns what comes until the next prompt"""
        self.send(text + "\r")
        return self.prompt()

    def prompt(self):
        return self.expect(PROMPT)

    def end(self, timeout=10):
        stop = time.time() + timeout
        while time.time() < stop:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                shell = termios.ECHO | termios.ICANON | termios.ISIG
                self.modes = termios.tcgetattr(self.fd)
                same(self.modes[3] & (shell | termios.NOFLSH), shell, "the terminal's modes")
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            self.read(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("still running: %r" % self.seen[-500:])


PROMPT = r"\x1b\[\?2004h\r\x1b\[J> \r\x1b\[2C"
OPTIONS = ["--nothink", "--temp", "0"]


def test_chat_remembers_and_leaves():
    c = Chat(*OPTIONS)
    holds("/help", c.prompt())
    holds("Clara.", c.say("My name is Clara."))
    got = c.say("What is my name?")
    holds("Clara", got)
    assert re.search(r"prompt \d+ tok .*ctx \d+/\d+ \| #", got), got
    n = int(re.search(r"prompt (\d+) tok", got).group(1))
    assert n < 14, "the second turn reads only itself: " + got
    c.send("\x04")
    same(c.end(), 0)


def test_chat_commands():
    c = Chat(*OPTIONS, "-t", "1")
    c.prompt()
    holds("unknown command", c.say("/nonsense"))
    holds("/regen", c.say("/help"))
    holds("no answer", c.say("/regen"))
    holds("no answer", c.say("/stats"))
    for bad in ("/ctx", "/ctx x", "/ctx 0", "/ctx 99999999999999999999", "/read", "/read /nowhere", "/set temp", "/set temp -1", "/set temp abc", "/set nothing 3", "/set model x",
                "/set hide-think 3", "/tool", "/tool call_0", "/tools /nowhere", "/tools -", "/read -", "/quit now", "/clear now", "/set top-k 99999999999"):
        got = c.say(bad)
        lines = [s for s in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\r", got).replace("\r", "\n").split("\n") if s.startswith("ds4: ")]
        same(len(lines), 1, bad + ": " + repr(got))
    holds("temp 0,", c.say("/show"))
    c.say("/set temp 0.5")
    holds("temp 0.5,", c.say("/show"))
    c.say("/set temp 0")
    c.say("/set tokens 2")
    assert "help" not in c.say("Hello")
    c.say("/set tokens unlimited")
    c.say("/set samplers temp,top-k")
    holds("samplers temp,top-k\r", c.say("/show"))
    holds(", 0 stop texts,", c.say("/show"))
    c.say("/set stop zzz")
    got = c.say("/show")
    holds(", 1 stop text,", got)
    holds("  machine  1 thread, ", got)
    c.say("/set stop")
    c.say("/clear")
    holds("Hello!", c.say("Hello"))
    holds("#", c.say("/stats"))
    holds("Hello!", c.say("/regen"))
    c.say("My name is Clara.")
    c.say("/clear")
    assert "Clara" not in c.say("What is my name?")
    holds("context 512", c.say("/ctx 512"))
    holds("Hello!", c.say("Hello"))
    path("ask.txt", "What is 12 + 7?")
    holds("19", c.say("/read ask.txt"))
    c.say("/think")
    got = c.say("What is 12 + 7?")
    holds("\x1b[2m", got)
    holds("19", got)
    c.say("/nothink")
    holds("no tool call", c.say("/tool x"))
    c.say("/system Be brief.")
    holds("Be brief.", c.say("/show"))
    c.send("/quit\r")
    same(c.end(), 0)


def test_chat_editing():
    c = Chat(*OPTIONS)
    c.prompt()
    holds("19", c.say("What is 12 + 8?\x1b[D\x1b[D\x1b[3~7"))                       # Left Left Delete 7
    holds("19", c.say("zzz\x15is 12 + 7?\x01What \x05"))                            # Ctrl-U, Ctrl-A, Ctrl-E
    holds("19", c.say("What is 12 + 7? rubbish\x17\x7f"))                           # Ctrl-W, Backspace
    holds("19", c.say("What is 12 + 7?ab\x02\x02\x0b"))                             # Ctrl-B twice, Ctrl-K
    holds("19", c.say("\x1b[A"))                                                   # Up: the last message again
    for keys in ("rubbish What is 12 + 7?\x17\x19\x01\x1bd\x1b[3~",                  # Ctrl-W, Ctrl-Y, Ctrl-A, Alt-D, Delete
                 "What is rubbish\x1b\x7f12 + 7?\x15\x19",                         # Alt-Backspace, Ctrl-U, Ctrl-Y
                 "is 12 + 7?" + "\x1b[1;3D" * 4 + "\x1b\x1b[DWhat "):              # Alt-Left as two terminals send it
        got = c.say(keys)
        holds("> What is 12 + 7?\r", got)
        holds("19\r\n", got)
    c.send("x" * 500 + "\x15")                                                     # longer than the screen is wide
    c.send("\x0c")
    c.expect(re.escape("\x1b[H\x1b[2J"))
    c.send("日本語é")
    c.expect("日本語")
    c.send("\x7f\x7f\x7f\x7f\x15")
    holds("19", c.say("What is 12 + 7?"))
    c.send("\x04")
    same(c.end(), 0)


def test_chat_history_keeps_what_was_edited():
    c = Chat(*OPTIONS)
    c.prompt()
    c.say("Hello")
    c.say("What is 12 + 8?")
    up, down = "\x1b[A", "\x1b[B"
    holds("19", c.say("new" + up + "\x7f\x7f7?" + up + down))
    c.say("Hello")
    c.send(up * 3)                                                                 # history has it as it was sent
    c.expect("> What is 12 \\+ 8\\?\r")
    c.send("\x15new" + up + up + down + down + "er")
    c.expect("> newer\r")
    c.send("\x15\x04")
    same(c.end(), 0)


def test_chat_multiline():
    c = Chat(*OPTIONS, "--json", "--no-stats")
    c.prompt()
    one = json.loads(re.search(r"\{.*\}", c.say("Hello")).group(0))
    c.say("/clear")
    def tokens(*keys):
        for k in keys[:-1]:
            c.send(k)
            time.sleep(0.05)
        got = c.say(keys[-1])
        c.say("/clear")
        return json.loads(re.search(r"\{.*\}", got).group(0))["prompt_tokens"]
    base = one["prompt_tokens"]
    two = tokens("Hello\n", "Hello")                                               # Ctrl-J
    assert two > base
    same(tokens("Hello\\\r", "Hello"), two)                                        # continuation
    same(tokens('"""Hello\r', 'Hello"""'), two)                                    # block
    same(tokens('"""\r', "Hello\r", "Hello\r", '"""'), two)
    same(tokens("\x1b[200~Hello\rHello\x1b[201~", ""), two)                        # bracketed paste
    same(tokens("\x1b[200~Hello\r\nHello\x1b[201~", ""), two)
    assert tokens("//help") > 0                                                    # sends "/help"
    assert tokens('"""/help"""') > 0
    c.send('   \r')
    c.prompt()                                                                     # white space sends nothing
    c.send("\x04")
    same(c.end(), 0)


def test_chat_end_of_input_inside_a_message():
    """Ctrl-D drops an unfinished message, not the chat; Up has its text."""
    c = Chat(*OPTIONS)
    c.prompt()
    c.say("My name is Clara.")
    for begin in ('"""What is my name?\r', "What is my name?\\\r"):
        c.send(begin)
        c.expect("\\.\\.")
        c.send("\x04")
        holds("(not sent: Up brings it back; Ctrl-D again leaves)\r\n", c.prompt())
        holds("Clara", c.say("\x1b[A"))
    c.send('"""\r')
    c.expect("\\.\\.")
    c.send("\x04")
    holds("(not sent; Ctrl-D again leaves)\r\n", c.prompt())
    c.send("\x04")
    same(c.end(), 0)
    c = Chat(*OPTIONS, env={"TERM": "dumb"})
    c.expect("> ")
    c.send('"""abc\n')
    c.expect("\\.\\.")
    c.send("\x04")
    c.expect("\\(not sent; Ctrl-D again leaves\\)\r\n> ")
    c.send("Hello\n")
    c.expect("today\\?\r\n")
    c.expect("> ")
    c.send("\x04")
    same(c.end(), 0)


def test_chat_interrupts():
    c = Chat(*OPTIONS, "--ignore-eos", "--isa", "scalar", "-t", "1", "--prefill-chunk", "16")
    c.prompt()
    c.send("Hello\r")
    c.expect("Hello!")
    time.sleep(0.3)
    c.send("\x03")
    c.prompt()
    c.send("half a line\x03")
    c.prompt()
    path("long.txt", "red house " * 1900)
    c.say("/set ignore-eos off")
    c.say("/clear")                                                                # how far the first answer came is a matter of time
    c.send("/read long.txt\r")
    c.expect("reading [0-9]+/[0-9]+ tokens")
    c.send("\x03")
    got = c.prompt()
    holds("taken back", got)
    read = int(re.search(r"prompt (\d+) tok", got).group(1))
    assert 0 < read < 3800, "the line counts what was read: " + got
    holds("Hello!", c.say("Hello"))
    c.send("\x03")
    holds("Ctrl-C again", c.prompt())
    c.send("\x03")
    same(c.end(), 0)


def test_chat_interrupts_from_outside():
    """At the prompt SIGINT is a Ctrl-C, and does not wait for the next message."""
    c = Chat(*OPTIONS)
    c.prompt()
    for _ in range(4):
        c.send("abc")
        c.expect("abc")
        os.kill(c.pid, signal.SIGINT)
        c.prompt()
    holds("Hello!", c.say("Hello"))
    c.send("\x04")
    same(c.end(), 0)


def test_chat_ended_from_outside_leaves_the_terminal_as_it_was():
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for ends in signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP:
        c = Chat(*OPTIONS)
        before = termios.tcgetattr(c.fd)
        c.prompt()
        assert termios.tcgetattr(c.fd) != before
        os.kill(c.pid, ends)
        c.expect(re.escape("\x1b[?2004l"))
        same((c.end(), c.modes), (-ends, before))
    c = Chat(*OPTIONS, "--ignore-eos")
    c.prompt()
    c.send("Hello\r")
    c.expect("today")
    os.kill(c.pid, signal.SIGTERM)
    same((c.end(), c.modes), (-signal.SIGTERM, before))


def test_chat_warns_before_it_is_ended():
    path("long.txt", "red house " * 1900)
    c = Chat(*OPTIONS, "--isa", "scalar", "-t", "1", "--prefill-chunk", "4096")
    c.prompt()
    c.send("/read long.txt\r")
    c.expect("\n")
    for _ in range(2):
        time.sleep(0.3)
        c.send("\x03")
    c.expect(re.escape("(stops when this step is done; the third Ctrl-C ends ds4)"))
    time.sleep(0.3)                                                                # the first brings it: the second may still be pending
    c.send("\x03")
    same(c.end(), 130)


def test_chat_misses_no_signal():
    """Neither between drawing and waiting for a key, when it comes right after what it answers."""
    c = Chat(*OPTIONS)
    c.prompt()
    for i in range(200):
        c.resize(24, 60 + i % 2)
        c.expect(re.escape("\r\x1b[J> \r\x1b[2C"), 5)
    for i in range(100):
        c.send("x")
        c.expect(re.escape("x\r\x1b[3C"))
        os.kill(c.pid, signal.SIGINT)
        c.expect(PROMPT, 5)
    c.send("\x04")
    same(c.end(), 0)


def test_chat_draws_the_prompt_again_after_a_stop():
    def stop_and_continue(c):
        os.kill(c.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(c.pid, os.WUNTRACED)[1])
        modes = termios.tcgetattr(c.fd)                                            # as a shell would leave the terminal
        modes[3] |= termios.ECHO | termios.ICANON
        termios.tcsetattr(c.fd, termios.TCSANOW, modes)
        c.seen = ""
        os.kill(c.pid, signal.SIGCONT)
    c = Chat(*OPTIONS)
    c.prompt()
    c.send("What is 12 + 7")
    c.expect(re.escape("What is 12 + 7\r\x1b[16C"))
    for i in range(100):
        stop_and_continue(c)
        c.expect(re.escape("\x1b[?2004h\r\x1b[J> What is 12 + 7\r\x1b[16C"), 5)
    holds("19", c.say("?"))
    c.send("\x04")
    same(c.end(), 0)
    c = Chat(*OPTIONS, env={"TERM": "dumb"})
    c.expect("> ")
    stop_and_continue(c)
    c.expect("> ")
    c.send("Hello\n")
    c.expect("today")
    c.send("\x04")
    same(c.end(), 0)


def test_chat_draws_over_what_a_resize_wrapped():
    def narrower(c, columns, up, *rows):
        c.resize(24, columns)
        c.expect(re.escape("\r" + "\x1b[%dA" % up * (up > 0) + "\x1b[J> " + "\r\r\n".join(rows)))
    c = Chat(*OPTIONS)
    c.prompt()
    c.send("x" * 70)
    c.expect("x{70}\r\x1b\\[72C")
    narrower(c, 40, 1, "x" * 38, "x" * 32 + "\r\x1b[32C")                            # 72 columns became 40 + 32
    narrower(c, 30, 3, "x" * 28, "x" * 30, "x" * 12 + "\r\x1b[12C")                  # (30 + 10) + (30 + 2)
    narrower(c, 80, 2, "x" * 70 + "\r")                                              # wider: rows that were ended stay
    c.send("\x15" + "日" * 15 + "\x02" * 5)
    c.expect("日{15}\r\x1b\\[22C")
    narrower(c, 21, 1, "日" * 9, "日" * 6 + "\r\x1b[2C")                              # no half of a character in a row
    narrower(c, 20, 1, "日" * 9, "日" * 6 + "\r\x1b[2C")
    c.send("\x15\x0b\x04")
    same(c.end(), 0)
    c = Chat(*OPTIONS, env={"STY": "1.screen"})
    c.prompt()
    c.send("x" * 70)
    c.expect("x{70}\r\x1b\\[72C")
    narrower(c, 40, 0, "x" * 38, "x" * 32 + "\r\x1b[32C")
    c.send("\x15\x04")
    same(c.end(), 0)


def test_chat_history_file():
    c = Chat(*OPTIONS)
    c.prompt()
    c.say("What is 12 + 7?")
    c.send("\x04")
    c.end()
    f = os.path.join(ENV["XDG_STATE_HOME"], "ds4", "history")
    same(os.stat(f).st_mode & 0o777, 0o600)
    c = Chat(*OPTIONS)
    c.prompt()
    holds("19", c.say("\x1b[A"))
    c.send("\x04")
    c.end()


def test_chats_share_the_history_file():
    state = path("shared")
    a, b = (Chat(*OPTIONS, env={"XDG_STATE_HOME": state}) for _ in range(2))
    a.prompt(), b.prompt()
    for c, text in ((a, "Hello"), (b, "What is 12 + 7?")):
        c.say(text)
        c.send("\x04")
        c.end()
    with open(os.path.join(state, "ds4", "history")) as f:
        same(f.read(), "Hello\nWhat is 12 + 7?\n")


def test_chat_line_typed_ahead():
    """A line that was typed while the answer ran is sent."""
    c = Chat(*OPTIONS, "--ignore-eos", "--isa", "scalar", "-t", "1", "-n", "200")
    c.prompt()
    c.send("Hello\r")
    c.expect("Hello!")
    c.send("/set ignore-eos off\rWhat is 12 + 7?\rMy name")
    c.expect("ignore-eos off\\)")
    c.expect("19\r\n")
    c.expect("> My name\r")
    c.say(" is Clara.")
    c.send("\x04")
    same(c.end(), 0)


def test_chat_line_typed_ahead_outlives_an_interrupt():
    """Ctrl-C stops the answer and leaves what was typed meanwhile; at a prompt it does not."""
    slow = [*OPTIONS, "--ignore-eos", "--isa", "scalar", "-t", "1"]
    for env in ({}, {"TERM": "dumb"}):
        c = Chat(*slow, env=env)
        c.expect("> ")
        c.send("dropped\x03")
        c.expect("\n")
        c.expect("> ")
        c.send("Hello" + ("\n" if env else "\r"))
        c.expect("Hello!")
        c.send("/set ignore-eos off\nWhat is ")
        c.expect("What is ")                                                           # echoed
        c.send("\x03")
        c.expect("ignore-eos off\\)")
        c.expect("> ")
        c.send("12 + 7?" + ("\n" if env else "\r"))
        c.expect("19\r\n")
        c.expect("> ")
        c.send("\x04")
        same(c.end(), 0)


def test_chat_shows_no_control_characters():
    c = Chat(*OPTIONS)
    c.prompt()
    c.send("a\u0085\u009bb\u00a0")
    holds("> a??b\u00a0", c.expect("b\u00a0"))
    assert "\u009b" not in c.seen
    c.send("\x15\x04")
    same(c.end(), 0)


def test_chat_survives_lack_of_memory():
    c = Chat(*OPTIONS, "-t", "1", limit=1 << 30)
    c.prompt()
    c.send("/read /dev/zero\r")
    holds("ds4: out of memory", c.prompt())
    holds("Hello!", c.say("Hello"))
    c.send("\x04")
    same(c.end(), 0)


def test_chat_blocks_are_no_commands():
    c = Chat(*OPTIONS)
    c.prompt()
    c.send("\x03")
    c.prompt()
    c.send('"""\r')
    c.expect("\\.\\.")
    c.send("\x03")                                                                 # not twice in a row: that was a block
    c.prompt()
    c.say('"""/clear"""')
    got = c.say("\x1b[A")
    holds('"""/clear"""', got)
    assert "new chat" not in got
    c.send("\x04")
    same(c.end(), 0)


def test_chat_tools():
    tools = path("tools.json", json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]))
    c = Chat(*OPTIONS, "--tools", tools, "-n", "4")
    c.prompt()
    c.say("Hello")
    holds("no tools", c.say("/tools"))
    holds("tools: 1", c.say("/tools " + tools))
    bad = path("empty_tool.json", "[{}]")
    holds('empty_tool.json[0] has no "function"', c.say("/tools " + bad))
    holds("tools    1", c.say("/show"))
    c.send("/bye\r")
    same(c.end(), 0)
    c = Chat(*OPTIONS, "--tools", bad)
    c.expect('empty_tool.json\\[0\\] has no "function"')
    same(c.end(), 1)


def test_colours():
    for env, args, want in (({}, [], True), ({"NO_COLOR": "1"}, [], False), ({"NO_COLOR": "1"}, ["--color", "always"], True), ({}, ["--color=never"], False), ({"TERM": "dumb"}, [], False)):
        c = Chat("--temp", "0", *args, "-p", "What is 12 + 7?", env=env)
        got = c.expect("19")
        same("\x1b[2m" in got, want, str((env, args)))
        c.end()


def test_dumb_terminal_and_end_of_input():
    c = Chat(*OPTIONS, env={"TERM": "dumb"})
    c.expect("> ")
    c.send("Hello\n")
    got = c.expect("today\\?")
    assert "\x1b" not in got, got
    c.expect("> ")
    c.send("\x04")
    c.expect("^\r\n")                                                              # where the shell's prompt goes
    same(c.end(), 0)


def test_demo_in_a_terminal():
    c = Chat("--demo")
    got = c.prompt()
    holds("Try", got)
    holds("What is 12 + 7?", got)
    holds("19", c.say("What is 12 + 7?"))
    c.send("\x04")
    same(c.end(), 0)


def main():
    pattern = sys.argv[3] if len(sys.argv) > 3 else ""
    passed = failed = 0
    for name, test in sorted(globals().items()):
        if not name.startswith("test_") or pattern not in name:
            continue
        start = time.time()
        try:
            test()
            passed += 1
            if pattern:
                print("ok   %s %.1f s" % (name, time.time() - start))
        except Exception:
            failed += 1
            print("FAILED %s\n%s\n" % (name, "\n".join(traceback.format_exc().strip().split("\n")[-14:])))
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


sys.exit(main())

"""Greedy answers of a model as cases for ds4 --script: chat.jsonl, think.jsonl, recall.jsonl and,
for prompts above 1,500 tokens, recall_long.jsonl.

    goldens.py CHECKPOINT DIR [TYPE]

The weights are rounded exactly as the GGUF of that TYPE stores them, the arithmetic is float32.
Only answers whose smallest distance between the two best logits is above MARGIN are kept: they
hold in every number format, on every engine. The hashes are left empty, for ds4 --script FILE
--update to fill in.
"""
import json
import os
import sys

import torch

import export_gguf
import model as M
from data import ASSISTANT, BOS, EOS, THINK, UNTHINK, USER
from tokenizer import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.dirname(HERE))
from make_story import make_case  # noqa: E402

QUESTIONS = [
    "Hello", "Who are you?", "What can you do?", "How are you?", "What is 3 + 4?",
    "What is 7 plus 5?", "What is 12 + 7?", "45 + 38 = ?", "What is 9 - 5?", "What is 17 minus 9?",
    "Write forty-seven in digits.", "Write 83 in words.", "What is the capital of France?",
    "What is the capital of Japan?", "What is the opposite of hot?", "What color is grass?",
    "What does a cow say?", "Repeat: river stone tiger", "Reverse the words: cat dog sun",
    "Write apple in capital letters.", "Count the words: plum plum plum plum",
    "What comes after Monday?", "Which is larger, 31 or 64?", "Name three colors.",
    "Count to ten.", "What is the meaning of life?", "Who wrote the lantern?", "Thank you", "Bye"]
CONVERSATIONS = [
    ["My name is Clara.", "What is my name?"],
    ["My favorite color is blue.", "What is 2 + 2?", "What is my favorite color?"],
    ["Remember the number 42.", "What does a dog say?", "What is my number?"],
    ["Hello", "What is 8 + 9?", "Thank you"]]
# tokens, facts; the last ones leave room for the answer in a context of 4,096
STORIES = [(256, 4), (512, 8), (1024, 16), (2048, 16), (3900, 4), (3900, 16)]
LIMIT, MARGIN = 160, 1.0


@torch.no_grad()
def greedy(model, tok, ids):
    """Generated ids, the end of turn included, and the smallest margin. Each token costs a pass
    over everything before it."""
    out, margin = [], float("inf")
    while len(out) < LIMIT and (not out or out[-1] != tok.id[EOS]):
        top = model(torch.tensor([ids + out]), "sparse")[0, -1].topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        out.append(int(top.indices[0]))
    return out, margin


def answer(model, tok, messages, think):
    """The case of a conversation, or None if its margin is small; and the answer's text."""
    text = BOS
    for m in messages:
        if m["role"] == "user":
            text += USER + m["content"] + ASSISTANT
        else:
            text += UNTHINK + m["content"] + EOS
    out, margin = greedy(model, tok, tok.encode(text + (THINK if think else UNTHINK)))
    done = out[-1] == tok.id[EOS]
    reply = tok.decode(out[:-1] if done else out)
    if think:
        reply = reply.split(UNTHINK, 1)[-1]
    name = " / ".join(m["content"] for m in messages if m["role"] == "user")
    case = {"name": name, "messages": messages, "think": think, "n": LIMIT, "text": reply,
            "tokens_out": out, "finish": "stop" if done else "length", "hash": ""}
    return (case if margin > MARGIN else None), reply


@torch.no_grad()
def story_case(model, tok, n_tokens, n_facts):
    """The first story that is answered without a mistake. One pass over story and right answer
    tells: the answer is greedy where it is the best token everywhere."""
    for seed in range(1, 50):
        case = make_case("nano", seed, n_facts, n_tokens=n_tokens)
        text = "\n".join(f"{n}={k}" for n, k in case["facts"].items())
        prompt = tok.encode(BOS + USER + case["messages"][0]["content"] + ASSISTANT + UNTHINK)
        out = tok.encode(text + EOS)
        top = model(torch.tensor([prompt + out]), "sparse")[0, len(prompt) - 1:-1].topk(2)
        margin = float((top.values[:, 0] - top.values[:, 1]).min())
        if top.indices[:, 0].tolist() == out and margin > MARGIN:
            return {**case, "name": f"recall {n_facts} facts, {len(prompt)} tokens", "n": LIMIT,
                    "text": text, "tokens_out": out, "finish": "stop", "hash": ""}
    raise SystemExit(f"no story of {n_tokens} tokens with {n_facts} facts is answered rightly")


def write(model, tok, directory, kind):
    export_gguf.round_weights(model, kind)
    model.eval()
    files = {"chat": [], "think": [], "recall": [], "recall_long": []}
    for think in (False, True):
        for q in QUESTIONS:
            messages = [{"role": "user", "content": q}]
            files["think" if think else "chat"].append(answer(model, tok, messages, think)[0])
    for questions in CONVERSATIONS:
        messages = []
        for q in questions:
            messages = messages + [{"role": "user", "content": q}]
            case, reply = answer(model, tok, messages, False)
            files["chat"].append(case)
            messages = messages + [{"role": "assistant", "content": reply}]
    for n_tokens, n_facts in STORIES:
        name = "recall_long" if n_tokens > 1500 else "recall"
        files[name].append(story_case(model, tok, n_tokens, n_facts))
    for name, cases in files.items():
        kept = {json.dumps(c["messages"]): c for c in cases if c}
        with open(os.path.join(directory, name + ".jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(c, ensure_ascii=False) + "\n" for c in kept.values())
        print(f"{name}.jsonl: {len(kept)} of {len(cases)} cases")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(M.load(sys.argv[1]), Tokenizer(os.path.join(HERE, "tokenizer.json")), sys.argv[2],
          sys.argv[3] if len(sys.argv) > 3 else "Q8_0")

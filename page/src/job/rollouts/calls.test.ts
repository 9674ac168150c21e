import { expect, test } from "vitest";
import { toolCallsOf } from "./calls";

const ADD = { name: "add", arguments: '{"a":1}', is_readable: true };

function turn(text: string): string[] {
  return toolCallsOf(text, { isTurn: true }).map((call) => (call.is_readable ? `${call.name} ${call.arguments}` : `unreadable ${call.arguments}`));
}

test("a call is shown with its name and arguments, also one that can't be read", () => {
  const text = 'first <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> then <tool_call>{"name": <b>';
  expect(toolCallsOf(text)).toEqual([ADD, { name: "", arguments: '{"name": <b>', is_readable: false }]);
  expect(toolCallsOf("no call <tool>")).toEqual([]);
});

test("each form that models write is the same call", () => {
  const call = '{"name": "add", "parameters": {"a": 1}}';
  const forms = [
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>',
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
    '<tool_call>\n<function=add>{"a": 1}</function>\n</tool_call>',
    `<|python_tag|>${call}<|eom_id|>`,
    `${call}<|eot_id|>`,
    `\n ${call}\n`,
    '{"type": "function", "name": "add", "arguments": {"a": 1}}',
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "Vm1p"}]</s>',
    '[TOOL_CALLS]add[ARGS]{"a": 1}</s>',
    '[TOOL_CALLS]add[CALL_ID]Vm1p[ARGS] {"a": 1}',
  ];
  expect(forms.map((text) => toolCallsOf(text, { isTurn: true }))).toEqual(forms.map(() => [ADD]));
});

test("several calls of one turn are all shown, in order", () => {
  expect(turn('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1, 2]}}')).toEqual(["f {}", 'g {"x":[1,2]}']);
  expect(turn('[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": {}}]')).toEqual(["f {}", "g {}"]);
  expect(turn('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"x": "]"}')).toEqual(["f {}", 'g {"x":"]"}']);
  expect(turn("<function=f>\n</function> and <function=g></function>")).toEqual(["f {}", "g {}"]);
});

test("Qwen3-Coder's parameters are texts, line breaks within them kept, also where one is never closed", () => {
  const text = "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=lines>\n1\n<2>\n</parameter>\n</function>\n</tool_call>";
  expect(turn(text)).toEqual(['write {"path":"a.txt","lines":"1\\n<2>"}']);
  expect(turn("<function=f><parameter=a>1<parameter=b>2</parameter></function>")).toEqual(['f {"a":"1","b":"2"}']);
});

test("an object that stands alone is a call in a turn of a trajectory, and else an answer", () => {
  const text = '{"name": "add", "parameters": {"a": 1}}';
  expect(toolCallsOf(text)).toEqual([]);
  expect(turn('{"name": "Ada", "age": 36}')).toEqual([]);
  expect(turn(`The call is ${text}`)).toEqual([]);
  expect(turn(`${text} and more`)).toEqual([]);
});

test("arguments are shown as they were written: no number is rounded, no blank of a text is lost", () => {
  const given = '{"n": 12345678901234567890, "x": 1e999,\n "t": "a  \\" b", "__proto__": {"y": 1}, "n": 2}';
  expect(turn(`<tool_call>{"name": "f", "arguments": ${given}}</tool_call>`)).toEqual([
    'f {"n":12345678901234567890,"x":1e999,"t":"a  \\" b","__proto__":{"y":1},"n":2}',
  ]);
});

test("what is no call is told as its text", () => {
  const bodies = ["", "{", "[1, 2]", "null", '{"arguments": {}}', '{"name": 7}', '{"name": ["f"], "arguments": {}}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "no json"}'];
  expect(bodies.flatMap((body) => turn(`<tool_call>${body}</tool_call>`))).toEqual(bodies.map((body) => `unreadable ${body}`));
  expect(turn('<|python_tag|>brave_search.call(query="x")')).toEqual(['unreadable brave_search.call(query="x")']);
  expect(turn("[TOOL_CALLS] nothing")).toEqual(["unreadable nothing"]);
  expect(turn('[TOOL_CALLS] [1, {"name": "f", "arguments": {}}]')).toEqual(["unreadable 1", "f {}"]);
  expect(turn("<function=f>{no}</function><function=>")).toEqual(["unreadable <function=f>{no}</function>", "unreadable <function=>"]);
  expect(turn("<function=f><parameter=a>1")).toEqual(["unreadable <function=f><parameter=a>1"]);
});

test("hostile texts stay texts", () => {
  const name = "<img src=x onerror=alert(1)>\u202e";
  expect(turn(`<|python_tag|>${JSON.stringify({ name, parameters: { __proto__: null, "</script>": name } })}`)[0]).toContain(`${name} {"</script>":"<img`);
  expect(turn("<function=constructor><parameter=__proto__>x</parameter></function>")).toEqual(['constructor {"__proto__":"x"}']);
});

test("the longest texts that are made to cost time are read at once", () => {
  const many = 200_000;
  const deep = `${"[".repeat(many)}${"]".repeat(many)}`;
  const texts = [
    "<tool_call>", "</tool_call>", "<function=", "<function=f>", "<function=f></function>", "<parameter=", "<|python_tag|>", "<|python_tag|>{", "[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]",
    "[TOOL_CALLS]{}", '{"', "{", " ", "<tool_call>{}</tool_call>", '"\\',
  ].map((part) => part.repeat(many)); // prettier-ignore
  texts.push(
    `<tool_call>{"name": "f", "arguments": {"a": ${deep}}}</tool_call>`,
    `[TOOL_CALLS]${deep}`,
    `{"name": "f", "parameters": {}}${" ".repeat(many)}x`,
    `<function=f>${"<parameter=a>".repeat(many)}</function>`,
    `<|python_tag|>${'{"name":"f","parameters":{}};'.repeat(many)}`,
    `<tool_call>{"name": "f", "arguments": {"a": "${"\\\\".repeat(many)}${"x".repeat(many)}"}}</tool_call>`,
  );
  const started = performance.now();
  for (const text of texts) expect(toolCallsOf(text, { isTurn: true }).length).toBeLessThanOrEqual(1024);
  expect(performance.now() - started).toBeLessThan(10_000);
});

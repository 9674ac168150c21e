// The tool calls of a turn, as its text has them. A record keeps no calls: what an environment was given is what the
// job's renderer read in the turn (onbeat/data/rendering/). Nothing here is evaluated, and each text is read in time that
// grows with its length.
//
//   <tool_call>{"name": …, "arguments": …}</tool_call>           Hermes: what onbeat/data/rendering/tool_calls.py reads
//   <function=NAME><parameter=KEY>VALUE</parameter></function>   Qwen3-Coder, within <tool_call> or alone
//   <|python_tag|>{"name": …, "parameters": …}                   Llama 3; several are parted by `;`
//   {"name": …, "parameters": …}                                 Llama 3, the whole turn of a trajectory
//   [TOOL_CALLS] [{"name": …, "arguments": …}]                   Mistral; newer ones write [TOOL_CALLS]NAME[ARGS]{…}

export interface ToolCall {
  name: string;
  /** As they were written, without the blanks between them; of XML an object of texts. */
  arguments: string;
  /** False for a call that can't be read; `arguments` is its text then. */
  is_readable: boolean;
}

/** As many as the renderer reads of one turn (contracts/environments/messages.py). */
const MAX_CALLS = 1024;
const OPENER = /<tool_call>|<function=([^<>\n]*)>|<\|python_tag\|>|\[TOOL_CALLS\]/g;
/** Behind a call: what ends a turn. */
const END = /^(?:\s|<\|[a-z_]{1,30}\|>|<\/s>)*$/;
const MAX_END = 200;

/** isTurn: whether it is a turn of a trajectory, where an object that stands alone may be a call. */
export function toolCallsOf(text: string, { isTurn = false } = {}): ToolCall[] {
  const calls: ToolCall[] = [];
  let at = 0;
  while (calls.length < MAX_CALLS) {
    OPENER.lastIndex = at;
    const opener = OPENER.exec(text);
    if (!opener) break;
    const from = opener.index + opener[0].length;
    const found = opener[1] !== undefined ? xml(text, opener.index) : opener[0] === "<tool_call>" ? hermes(text, from) : listed(text, from);
    calls.push(...found.calls);
    at = found.end;
  }
  if (!calls.length && isTurn) return alone(text);
  return calls.slice(0, MAX_CALLS);
}

interface Found {
  calls: ToolCall[];
  /** Where the text goes on behind them. */
  end: number;
}

function unreadable(text: string): ToolCall {
  return { name: "", arguments: text.trim(), is_readable: false };
}

function hermes(text: string, from: number): Found {
  const close = text.indexOf("</tool_call>", from);
  const body = text.slice(from, close < 0 ? undefined : close).trim();
  const end = close < 0 ? text.length : close + "</tool_call>".length;
  if (body.startsWith("<function=")) return { calls: xml(body, 0).calls, end };
  return { calls: [written(body, ["arguments"])], end };
}

const FUNCTION = /<function=([^<>\n]*)>/y;
const PARAMETER = /<parameter=([^<>\n]*)>/g;

function xml(text: string, from: number): Found {
  FUNCTION.lastIndex = from;
  const name = FUNCTION.exec(text)?.[1]?.trim();
  const close = text.indexOf("</function>", from);
  if (!name || close < 0) return { calls: [unreadable(text.slice(from))], end: text.length };
  const body = text.slice(FUNCTION.lastIndex, close).trim();
  const end = close + "</function>".length;
  if (body.startsWith("{")) return { calls: [called(name, body) ?? unreadable(text.slice(from, end))], end };
  // A model may forget to close a parameter: the next one closes it too.
  const starts = [...body.matchAll(PARAMETER)];
  const parameters = starts.map((start, number) => {
    const value = body.slice(start.index + start[0].length, starts[number + 1]?.index);
    const closed = value.lastIndexOf("</parameter>");
    return `${JSON.stringify(start[1])}:${JSON.stringify((closed < 0 ? value : value.slice(0, closed)).replace(/^\n/, "").replace(/\n$/, ""))}`;
  });
  return { calls: [{ name, arguments: `{${parameters.join(",")}}`, is_readable: true }], end };
}

const NAMED = /\s*([^\s[\]{}<>]{1,256})(?:\[CALL_ID\][^\s[\]{}]{0,256})?\[ARGS\]\s*/y;

/** Of Llama's and Mistral's tokens: JSON of a call or of a list of them, or a name and JSON of its arguments. */
function listed(text: string, from: number): Found {
  NAMED.lastIndex = from;
  const name = NAMED.exec(text)?.[1];
  let at = name === undefined ? from : NAMED.lastIndex;
  const calls: ToolCall[] = [];
  while (calls.length < MAX_CALLS) {
    at = behindBlanks(text, at);
    const end = text[at] === "{" || text[at] === "[" ? valueEnd(text, at) : -1;
    if (end < 0) return { calls: [...calls, unreadable(text.slice(from))], end: text.length };
    const body = text.slice(at, end);
    calls.push(...(name === undefined ? all(body) : [called(name, body) ?? unreadable(body)]));
    const next = behindBlanks(text, end);
    if (text[next] !== ";") return { calls, end };
    at = next + 1;
  }
  return { calls, end: at };
}

function alone(text: string): ToolCall[] {
  const from = behindBlanks(text, 0);
  const end = text[from] === "{" ? valueEnd(text, from) : -1;
  if (end < 0 || text.length - end > MAX_END || !END.test(text.slice(end))) return [];
  const body = text.slice(from, end);
  const names = ["parameters", "arguments"];
  if (!isJson(body) || !parts(body).some(([key]) => names.includes(key))) return [];
  return [written(body, names)].filter((call) => call.is_readable);
}

function all(body: string): ToolCall[] {
  const names = ["arguments", "parameters"];
  if (body.startsWith("{")) return [written(body, names)];
  return isJson(body) ? parts(body).slice(0, MAX_CALLS).map(([, item]) => written(item, names)) : [unreadable(body)];
}

/** A call that is JSON of an object, with its arguments under one of these names. */
function written(body: string, names: readonly string[]): ToolCall {
  if (!body.startsWith("{") || !isJson(body)) return unreadable(body);
  const found = new Map(parts(body));
  const name: unknown = JSON.parse(found.get("name") ?? "null");
  const key = names.find((one) => found.has(one));
  return (typeof name === "string" && called(name, (key && found.get(key)) ?? "{}")) || unreadable(body);
}

/** Null where the arguments are no object; some models write it as a text. */
function called(name: string, given: string): ToolCall | null {
  if (!isJson(given)) return null;
  const json = given.startsWith('"') ? String(JSON.parse(given)) : given;
  if (!json.trimStart().startsWith("{") || !isJson(json)) return null;
  return { name, arguments: json.replace(/("[^"\\]*(?:\\[\s\S][^"\\]*)*")|\s+/g, "$1"), is_readable: true };
}

function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The texts of an object's values by their keys, or of a list's, as they were written: JSON.parse would round a long
 * number. json: what JSON.parse takes. */
function parts(json: string): [key: string, value: string][] {
  const found: [string, string][] = [];
  const keyed = json[0] === "{";
  let at = behindBlanks(json, 1);
  while (at < json.length - 1) {
    let key = "";
    if (keyed) {
      const end = valueEnd(json, at);
      key = String(JSON.parse(json.slice(at, end)));
      at = behindBlanks(json, behindBlanks(json, end) + 1);
    }
    const end = valueEnd(json, at);
    found.push([key, json.slice(at, end)]);
    at = behindBlanks(json, behindBlanks(json, end) + 1);
  }
  return found;
}

function behindBlanks(text: string, at: number): number {
  while (at < text.length && /\s/.test(text[at] as string)) at += 1;
  return at;
}

/** Where the JSON value ends that begins at `from`; -1 where it doesn't. */
function valueEnd(text: string, from: number): number {
  let depth = 0;
  let inText = false;
  for (let at = from; at < text.length; at += 1) {
    const character = text[at] as string;
    if (inText) {
      if (character === "\\") at += 1;
      else if (character === '"') inText = false;
      if (!inText && depth === 0) return at + 1;
    } else if (character === '"') inText = true;
    else if (character === "{" || character === "[") depth += 1;
    else if (character === "}" || character === "]") {
      if (depth === 0) return at;
      depth -= 1;
      if (depth === 0) return at + 1;
    } else if (depth === 0 && (character === "," || /\s/.test(character))) return at;
  }
  return depth === 0 && !inText ? text.length : -1;
}

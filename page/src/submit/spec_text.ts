// Reads the text of a spec, TOML or JSON, into its value and the place of each key.
//
//   text ─▶ readSpecText ─▶ spec, to be sent to the gateway
//                         ├ places, by which a refusal's field finds its line
//                         └ fault, where the text is not TOML or JSON yet
import { jsonLanguage } from "@codemirror/lang-json";
import type { SyntaxNode } from "@lezer/common";
import { stringify as tomlOf } from "smol-toml";
import { ParseError, parseTOML, type AST } from "toml-eslint-parser";

export type Json = null | boolean | number | string | Json[] | Table;
export type Table = { [name: string]: Json };
export type Language = "toml" | "json";
type Key = string | number;

/** The stretch of the text that stands for one key, table or list entry. Offsets are UTF-16 units, as in the editor. */
export interface Place {
  path: readonly Key[];
  from: number;
  to: number;
}

/** A fault of the text itself, before any rule of a spec is asked about. */
export interface TextFault {
  problem: string;
  from: number;
  to: number;
}

export interface SpecText {
  text: string;
  language: Language;
  /** Null where the text has a fault. */
  spec: Table | null;
  places: readonly Place[];
  fault: TextFault | null;
}

/** A TOML document can't begin with a brace, and a spec in JSON always does. */
export function languageOf(text: string): Language {
  return text.trimStart().startsWith("{") ? "json" : "toml";
}

export function readSpecText(text: string): SpecText {
  return languageOf(text) === "json" ? readJson(text) : readToml(text);
}

/** Writes a spec as TOML; as JSON where it has a null, which TOML has no word for. */
export function writeSpecText(spec: Table, language: Language): string {
  if (language === "json" || hasNull(spec)) return `${JSON.stringify(spec, null, 2)}\n`;
  return tomlOf(spec);
}

function hasNull(value: Json): boolean {
  if (value === null) return true;
  if (typeof value !== "object") return false;
  return Object.values(value).some(hasNull);
}

export function isTable(value: unknown): value is Table {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// A field of a refusal and its place

/**
 * Finds the place of a field that the gateway names, as `stages[0].lowest`. A field that the text leaves out has the
 * place of the innermost table around it; where there is none, the first line.
 */
export function placeOfField(specText: SpecText, field: string): Place {
  let path = pathOfField(specText.spec, field);
  while (path.length) {
    const place = specText.places.find((candidate) => isSamePath(candidate.path, path));
    if (place) return place;
    path = path.slice(0, -1);
  }
  return { path: [], ...stretch(specText.text, 0) };
}

/** The keys of a field, as far as the spec has them. An entry of a list may be named by its `name` or `type`, too. */
function pathOfField(spec: Table | null, field: string): Key[] {
  const path: Key[] = [];
  let value: Json | undefined = spec ?? undefined;
  for (const segment of field.match(/[^.[\]]+/g) ?? []) {
    let key: Key = segment;
    if (Array.isArray(value)) {
      const named = value.findIndex((entry) => isTable(entry) && (entry.name === segment || entry.type === segment));
      key = /^\d+$/.test(segment) ? Number(segment) : named;
      value = value[key];
    } else if (isTable(value) && Object.hasOwn(value, segment)) {
      value = value[segment];
    } else {
      value = undefined;
    }
    if (value === undefined) break;
    path.push(key);
  }
  return path;
}

function isSamePath(left: readonly Key[], right: readonly Key[]): boolean {
  return left.length === right.length && left.every((key, index) => key === right[index]);
}

/** The line of an offset, counted from 1. */
export function lineOf(text: string, offset: number): number {
  return text.slice(0, offset).split("\n").length;
}

// JSON

function readJson(text: string): SpecText {
  const tree = jsonLanguage.parser.parse(text);
  try {
    const spec = JSON.parse(text) as Table;
    const places: Place[] = [];
    const root = tree.topNode.firstChild;
    if (root) collectJsonPlaces(root, [], text, places);
    return { text, language: "json", spec, places, fault: null };
  } catch (error) {
    let from = text.length;
    tree.iterate({
      enter: (node) => {
        if (node.type.isError) from = Math.min(from, node.from);
      },
    });
    // The position in the browser's own sentence is dropped: the editor underlines it.
    const reason = String((error as Error).message).replace(/ (in JSON )?at (position|line) .*$/, "");
    return { text, language: "json", spec: null, places: [], fault: { problem: `The text is not JSON yet: ${reason}`, ...stretch(text, from) } };
  }
}

function collectJsonPlaces(node: SyntaxNode, path: Key[], text: string, places: Place[]): void {
  if (node.name === "Object") {
    for (const property of node.getChildren("Property")) {
      const name = property.firstChild;
      const value = property.lastChild;
      if (!name || !value) continue;
      const key = JSON.parse(text.slice(name.from, name.to)) as string;
      const isContainer = value.name === "Object" || value.name === "Array";
      places.push({ path: [...path, key], from: name.from, to: isContainer ? name.to : value.to });
      collectJsonPlaces(value, [...path, key], text, places);
    }
  }
  if (node.name === "Array") {
    let index = 0;
    for (let entry = node.firstChild; entry; entry = entry.nextSibling) {
      if (entry.name === "[" || entry.name === "]" || entry.name === ",") continue;
      places.push({ path: [...path, index], from: entry.from, to: endOfLine(text, entry.from, entry.to) });
      collectJsonPlaces(entry, [...path, index], text, places);
      index += 1;
    }
  }
}

// TOML

function readToml(text: string): SpecText {
  let program: AST.TOMLProgram;
  try {
    program = parseTOML(text);
  } catch (error) {
    if (!(error instanceof ParseError)) throw error;
    const reason = error.message.replace(/\.$/, "");
    return { text, language: "toml", spec: null, places: [], fault: { problem: `The text is not TOML yet: ${reason}`, ...stretch(text, error.index) } };
  }
  const reader = new TomlReader(text);
  reader.readDocument(program.body[0]);
  return { text, language: "toml", spec: reader.fault ? null : reader.spec, places: reader.places, fault: reader.fault };
}

/** Walks the syntax of one TOML document, and collects its value and the place of each key. */
class TomlReader {
  readonly spec: Table = emptyTable();
  readonly places: Place[] = [];
  fault: TextFault | null = null;

  constructor(private readonly text: string) {}

  readDocument(document: AST.TOMLTopLevelTable): void {
    for (const entry of document.body) {
      if (entry.type === "TOMLKeyValue") {
        this.readKeyValue(entry, this.spec, []);
        continue;
      }
      const path = entry.resolvedKey;
      this.addPlaces(path, 0, entry.key.range);
      const table = containerAt(this.spec, path) as Table;
      for (const keyValue of entry.body) this.readKeyValue(keyValue, table, path);
    }
  }

  private readKeyValue(keyValue: AST.TOMLKeyValue, table: Table, tablePath: readonly Key[]): void {
    const keys = keyValue.key.keys.map((key) => (key.type === "TOMLBare" ? key.name : key.value));
    const path = [...tablePath, ...keys];
    const from = keyValue.key.range[0];
    this.addPlaces(path, tablePath.length, [from, endOfLine(this.text, from, keyValue.value.range[1])]);
    const parent = containerAt(table, keys.slice(0, -1)) as Table;
    parent[keys.at(-1) as string] = this.readValue(keyValue.value, path);
  }

  private readValue(node: AST.TOMLContentNode, path: readonly Key[]): Json {
    if (node.type === "TOMLInlineTable") {
      const table = emptyTable();
      for (const keyValue of node.body) this.readKeyValue(keyValue, table, path);
      return table;
    }
    if (node.type === "TOMLArray") {
      return node.elements.map((element, index) => {
        const elementPath = [...path, index];
        this.addPlaces(elementPath, path.length, [element.range[0], endOfLine(this.text, element.range[0], element.range[1])]);
        return this.readValue(element, elementPath);
      });
    }
    if (node.kind === "float" && !Number.isFinite(node.value)) {
      this.fault ??= { problem: "A number of a spec is finite; inf and nan are not", from: node.range[0], to: node.range[1] };
    }
    // A spec has no dates: the gateway refuses the text of one by its field.
    return node.value instanceof Date ? this.text.slice(...node.range) : node.value;
  }

  /** Adds the place of a path, and of each table that its dotted key opens on the way. known: length of the part that has one. */
  private addPlaces(path: readonly Key[], known: number, [from, to]: readonly [number, number]): void {
    for (let length = known + 1; length <= path.length; length += 1) {
      const part = path.slice(0, length);
      const isNew = length === path.length || !this.places.some((place) => isSamePath(place.path, part));
      if (isNew) this.places.push({ path: part, from, to });
    }
  }
}

/** A table without a prototype: `__proto__` is a key in it as any other. */
function emptyTable(): Table {
  return Object.create(null) as Table;
}

/** The table or list at a path, which is made where it isn't there yet: a list where the next key is a number. */
function containerAt(root: Table, path: readonly Key[]): Json {
  let container: Json = root;
  path.forEach((key, index) => {
    const parent = container as Record<Key, Json>;
    if (parent[key] === undefined) parent[key] = typeof path[index + 1] === "number" ? [] : emptyTable();
    container = parent[key] as Json;
  });
  return container;
}

// Stretches of text

/** The text from an offset to the end of its line. */
function stretch(text: string, from: number): { from: number; to: number } {
  const start = Math.max(0, Math.min(from, text.length));
  const end = text.indexOf("\n", start);
  return { from: start, to: end < 0 ? text.length : end };
}

/** The end of a value, or of its first line where it has several. */
function endOfLine(text: string, from: number, to: number): number {
  const end = text.indexOf("\n", from);
  return end < 0 ? to : Math.min(to, end);
}

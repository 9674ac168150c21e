// The text editor of a spec: CodeMirror with the syntax of TOML or JSON, and an underline at each refused field.
//
// It stands in a shadow root: there CodeMirror's styles are constructed sheets, which the page's policy allows; in the
// document they would be <style> elements, which it forbids.
import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { json } from "@codemirror/lang-json";
import { bracketMatching, HighlightStyle, StreamLanguage, syntaxHighlighting, type StreamParser } from "@codemirror/language";
import { toml } from "@codemirror/legacy-modes/mode/toml";
import { nextDiagnostic, setDiagnostics, type Diagnostic } from "@codemirror/lint";
import { Compartment, EditorState, type Extension } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { languageOf, type Language } from "./spec_text";

export interface Marker {
  from: number;
  to: number;
  message: string;
}

export interface EditorProps {
  label: string;
  text: string;
  /** Changes with each text that was not typed here, as a template's: that one takes the place of the editor's. */
  revision: number;
  markers: readonly Marker[];
  /** Offers keys and words at the cursor. */
  completion: Extension;
  onChange: (text: string) => void;
  /** Ctrl-Enter. */
  onSubmit: () => void;
  /** Is called once with what moves the cursor to an offset. */
  onReady: (goTo: (offset: number) => void) => void;
}

/** Of `9e-4` the library's mode takes the 9 alone for a number. */
const EXPONENT = /^[+-]?\d[\d_]*(\.[\d_]+)?[eE][+-]?\d+/;
const tomlMode = toml as StreamParser<{ inString: unknown; lhs: boolean }>;
const tomlSyntax = StreamLanguage.define({
  ...tomlMode,
  token: (stream, state) => {
    const isValue = !state.inString && !state.lhs;
    return isValue && stream.match(EXPONENT) ? "number" : tomlMode.token(stream, state);
  },
});
const SYNTAX: Record<Language, Extension> = { toml: tomlSyntax, json: json() };

const COLOURS = HighlightStyle.define([
  { tag: tags.comment, color: "var(--text-3)" },
  { tag: [tags.propertyName, tags.atom], color: "var(--accent)" },
  { tag: tags.string, color: "var(--c3)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--c2)" },
]);

const LOOK = EditorView.theme({
  "&": { fontSize: "13px", color: "var(--text)", backgroundColor: "var(--surface)", borderRadius: "var(--r2)" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "-1px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.6" },
  ".cm-content": { padding: "12px 0", minHeight: "420px", caretColor: "var(--text)" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-gutters": { color: "var(--text-3)", backgroundColor: "transparent", border: "0" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--sunken)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { background: "var(--accent-soft)" },
  // CodeMirror's own marks are data: images, which the page's policy forbids.
  ".cm-lintRange-error": { backgroundImage: "none", textDecoration: "underline wavy var(--bad)", textDecorationSkipInk: "none", textUnderlineOffset: "4px" },
  ".cm-lintRange-active": { backgroundColor: "var(--bad-soft)" },
  ".cm-lintPoint-error:after": { borderBottomColor: "var(--bad)" },
  ".cm-tooltip": { color: "var(--text)", backgroundColor: "var(--surface)", border: "1px solid var(--line-strong)", borderRadius: "var(--r1)", maxWidth: "min(420px, 90vw)" },
  ".cm-diagnostic-error": { borderLeft: "3px solid var(--bad)", whiteSpace: "normal" },
  ".cm-tooltip.cm-tooltip-autocomplete > ul > li[aria-selected]": { color: "var(--on-accent)", background: "var(--accent)" },
  ".cm-completionInfo": { padding: "8px 10px", fontFamily: "var(--font)", fontSize: "12px", whiteSpace: "pre-wrap" },
  ".cm-completionDetail": { fontStyle: "normal", opacity: "0.7" },
});

/**
 * Replaces a selection by what is typed over it. The browser would do it with a `style` attribute that carries the colour
 * of the replaced text over, which the page's policy forbids.
 */
const typeOverSelection = EditorView.domEventHandlers({
  beforeinput(event, view) {
    const isTyped = event.inputType === "insertText" && event.data !== null;
    if (!isTyped || view.composing || view.state.selection.main.empty) return false;
    view.dispatch(view.state.replaceSelection(event.data!), { userEvent: "input.type", scrollIntoView: true });
    return true;
  },
});

export function Editor(props: EditorProps): JSX.Element {
  const host = useRef<HTMLDivElement>(null);
  const view = useRef<EditorView | null>(null);
  // The editor is made once, and calls what the newest render gave.
  const newest = useRef(props);
  newest.current = props;
  const syntax = useRef(new Compartment());
  const state = useRef(new Compartment());

  useEffect(() => {
    const root = host.current!.attachShadow({ mode: "open" });
    const submit = (): boolean => {
      newest.current.onSubmit();
      return true;
    };
    const editor = new EditorView({
      root,
      parent: root,
      state: EditorState.create({
        doc: newest.current.text,
        extensions: [
          lineNumbers(),
          history(),
          drawSelection(),
          highlightActiveLine(),
          bracketMatching(),
          EditorView.lineWrapping,
          typeOverSelection,
          syntax.current.of(SYNTAX[languageOf(newest.current.text)]),
          state.current.of([]),
          newest.current.completion,
          syntaxHighlighting(COLOURS),
          LOOK,
          // Tab leaves the editor, as it leaves any field: a form is walked by it.
          keymap.of([{ key: "Mod-Enter", run: submit }, { key: "F8", run: nextDiagnostic }, ...defaultKeymap, ...historyKeymap]),
          EditorView.contentAttributes.of({ "aria-label": newest.current.label, spellcheck: "false", autocorrect: "off", autocapitalize: "off" }),
          EditorView.updateListener.of((update) => {
            if (!update.docChanged) return;
            newest.current.onChange(update.state.doc.toString());
          }),
        ],
      }),
    });
    view.current = editor;
    newest.current.onReady((offset) => {
      const anchor = Math.min(offset, editor.state.doc.length);
      editor.dispatch({ selection: { anchor }, effects: EditorView.scrollIntoView(anchor, { y: "center" }) });
      editor.focus();
    });
    return () => editor.destroy();
  }, []);

  const { text, markers, revision } = props;
  const language = languageOf(text);
  // Not at each change of `text`: one that was typed comes back late, and would undo what was typed since. And at once,
  // not after the next frame, for the same reason.
  useLayoutEffect(() => {
    const editor = view.current;
    if (editor && editor.state.doc.toString() !== text) {
      editor.dispatch({ changes: { from: 0, to: editor.state.doc.length, insert: text } });
    }
  }, [revision]);
  useEffect(() => view.current?.dispatch({ effects: syntax.current.reconfigure(SYNTAX[language]) }), [language]);
  useEffect(() => {
    const editor = view.current;
    if (!editor) return;
    const invalid = EditorView.contentAttributes.of({ "aria-invalid": markers.length ? "true" : "false" });
    editor.dispatch({ effects: state.current.reconfigure(invalid) }, setDiagnostics(editor.state, diagnostics(markers, editor.state.doc.length)));
  }, [markers]);

  return <div class="editor" ref={host} />;
}

/** The markers as CodeMirror has them, within the text: it may have become shorter since the gateway was asked. */
function diagnostics(markers: readonly Marker[], length: number): Diagnostic[] {
  return markers.map(({ from, to, message }) => ({ from: Math.min(from, length), to: Math.min(to, length), severity: "error", message }));
}

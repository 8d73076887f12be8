// What the server is asked, and where the reader is, which is kept in the address: #/VIEW?name=value&..

export async function get(path, parameters = []) {
  const query = new URLSearchParams(parameters).toString();
  const reply = await fetch(query ? `${path}?${query}` : path);
  const content = await reply.json();
  if (!reply.ok) throw new Error(content.error?.message || reply.statusText);
  return content;
}

// The name is in the address for the browser's cache alone: a file that is written anew may have another picture in this place.
export const pictureUrl = (told, n) => `/api/picture?${new URLSearchParams({ key: told.key, n, name: told.pictures[n] })}`;

const kept = new Map(); // episodes by key and version of the index

export function episode(key, version) {
  const name = `${version}|${key}`;
  if (!kept.has(name)) {
    if (kept.size > 60) kept.delete(kept.keys().next().value);
    kept.set(name, get("/api/episode", [["key", key]]).catch((error) => { kept.delete(name); throw error; }));
  }
  return kept.get(name);
}

// --- Where the reader is, kept in the address: #/VIEW?name=value&. ---

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "overview", query: [...new URLSearchParams(query)] };
}

export function address(view, query) {
  const text = new URLSearchParams(query).toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function go(view, query = []) {
  location.hash = address(view, query);
}

// The address alone; nothing is drawn anew.
export function note(view, query) {
  history.replaceState(null, "", address(view, query));
}

export const one = (query, name) => query.find(([key]) => key === name)?.[1];
export const many = (query, name) => query.filter(([key]) => key === name).map(([, value]) => value);
export const without = (query, ...names) => query.filter(([key]) => !names.includes(key));

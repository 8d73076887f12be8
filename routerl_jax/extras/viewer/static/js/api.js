// What the server is asked.

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

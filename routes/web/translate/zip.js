// The part of the ZIP format that EPUB needs: reads stored and deflated entries, writes stored ones.

const LOCAL = 0x04034b50;
const CENTRAL = 0x02014b50;
const END = 0x06054b50;
const LARGEST = 200 * 1024 * 1024;
const UTF8_NAMES = 0x800;

async function inflate(bytes, size) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const plain = new Uint8Array(await new Response(stream).arrayBuffer());
  if (plain.length !== size) throw new Error("a damaged ZIP entry");
  return plain;
}

/** Read a ZIP file: name -> bytes, in order. Throws Error. */
export async function readZip(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  while (end >= 0 && view.getUint32(end, true) !== END) end -= 1;
  if (end < 0) throw new Error("not a ZIP file");
  const found = new Map();
  let at = view.getUint32(end + 16, true);
  let total = 0;
  for (let count = view.getUint16(end + 10, true); count > 0; count--) {
    if (view.getUint32(at, true) !== CENTRAL) throw new Error("a damaged ZIP file");
    const [method, packed, size] = [view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint32(at + 24, true)];
    const [nameLength, extra, comment] = [28, 30, 32].map((place) => view.getUint16(at + place, true));
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength));
    const local = view.getUint32(at + 42, true);
    const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    total += size;
    if (total > LARGEST) throw new Error(`more than ${LARGEST >> 20} MiB unpacked`);
    if (method !== 0 && method !== 8) throw new Error(`ZIP method ${method}`);
    const content = bytes.subarray(start, start + packed);
    if (!name.endsWith("/")) found.set(name, method === 8 ? await inflate(content, size) : content);
    at += 46 + nameLength + extra + comment;
  }
  return found;
}

const TABLE = Uint32Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value;
});

function crc32(bytes) {
  let crc = ~0;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}

/** Encode the fields of a header, given as [value, size in bytes]. */
function header(...fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [, size]) => sum + size, 0)));
  let at = 0;
  for (const [value, size] of fields) {
    if (size === 4) view.setUint32(at, value, true);
    else view.setUint16(at, value, true);
    at += size;
  }
  return view;
}

/** Write name -> bytes as a ZIP file, in order, without compression. */
export function writeZip(files, type) {
  const parts = [];
  const directory = [];
  let at = 0;
  let directorySize = 0;
  for (const [name, content] of files) {
    const label = new TextEncoder().encode(name);
    // Version, flags, method, time, date (1980-01-01), checksum, packed size, size, length of the name, of extras.
    const common = [[20, 2], [UTF8_NAMES, 2], [0, 2], [0, 2], [33, 2], [crc32(content), 4], [content.length, 4], [content.length, 4], [label.length, 2], [0, 2]];
    parts.push(header([LOCAL, 4], ...common), label, content);
    directory.push(header([CENTRAL, 4], [20, 2], ...common, [0, 2], [0, 2], [0, 2], [0, 4], [at, 4]), label);
    at += 30 + label.length + content.length;
    directorySize += 46 + label.length;
  }
  const end = header([END, 4], [0, 2], [0, 2], [files.size, 2], [files.size, 2], [directorySize, 4], [at, 4], [0, 2]);
  return new Blob([...parts, ...directory, end], { type });
}

// DeepL's own client against the service of the first argument; the second is its password. Prints what it got as JSON.
import fs from 'node:fs';
import * as deepl from 'deepl-node';

const [url, password, folder] = process.argv.slice(2);
const client = new deepl.DeepLClient(password, { serverUrl: url, maxRetries: 1, minTimeout: 30000 });
const found = {};
const [first, second] = await client.translateText(['say Guten Morgen!', '12.5 {x}'], 'en', 'de', {
  context: 'A page about mornings.', formality: 'prefer_more', modelType: 'latency_optimized', splitSentences: 'off',
});
found.texts = [first.detectedSourceLang, second.text, second.billedCharacters, first.modelTypeUsed];
const html = await client.translateText('<p translate="no">Stay</p><p>42</p>', null, 'zh-HANT', { tagHandling: 'html' });
const xml = await client.translateText('<d><raw>Keep</raw></d>', null, 'pt-BR', {
  tagHandling: 'xml', ignoreTags: ['raw'], outlineDetection: false, splittingTags: ['d'], nonSplittingTags: [],
});
found.tags = [html.text, xml.text];
const sources = await client.getSourceLanguages(), targets = await client.getTargetLanguages();
found.languages = [sources.some((one) => one.code === 'zh'), targets.some((one) => one.code === 'zh-HANT')];
const usage = await client.getUsage();
found.usage = [usage.character.count >= 0, usage.anyLimitReached()];
found.pairs = (await client.getGlossaryLanguagePairs()).length > 0;
const entries = new deepl.GlossaryEntries({ entries: { Hallo: 'Howdy', Welt: 'world' } });
const glossary = await client.createGlossary('node', 'de', 'en', entries);
found.glossary = [glossary.entryCount, glossary.ready, glossary.creationTime instanceof Date];
found.entries = (await client.getGlossaryEntries(glossary)).entries();
found.listed = (await client.listGlossaries()).some((one) => one.glossaryId === glossary.glossaryId);
found.withGlossary = typeof (await client.translateText('Hallo', 'de', 'en-US', { glossary })).text;
await client.deleteGlossary(glossary);
const many = await client.createMultilingualGlossary('both', [
  { sourceLangCode: 'de', targetLangCode: 'en', entries },
  { sourceLangCode: 'en', targetLangCode: 'de', entries: new deepl.GlossaryEntries({ entries: { hello: 'hallo' } }) },
]);
await client.replaceMultilingualGlossaryDictionary(many, {
  sourceLangCode: 'en', targetLangCode: 'de', entries: new deepl.GlossaryEntries({ entries: { hi: 'na' } }),
});
await client.updateMultilingualGlossaryName(many, 'renamed');
const again = await client.getMultilingualGlossary(many.glossaryId);
found.many = [again.name, again.dictionaries.map((one) => one.entryCount)];
found.dictionary = (await client.getMultilingualGlossaryDictionaryEntries(many, 'en', 'de')).entries.entries();
await client.deleteMultilingualGlossary(many);
fs.writeFileSync(`${folder}/in.html`, '<p>Hello there</p>');
const handle = await client.uploadDocument(`${folder}/in.html`, 'en', 'de');
let status = await client.getDocumentStatus(handle); // translateDocument waits 5 s between these
for (; !status.done(); status = await client.getDocumentStatus(handle)) await new Promise((go) => setTimeout(go, 100));
await client.downloadDocument(handle, `${folder}/out.html`);
found.document = [status.status, fs.readFileSync(`${folder}/out.html`, 'utf8').startsWith('<p>')];
const failed = async (call) => { try { await call(); } catch (error) { return error.constructor.name; } };
found.errors = [
  await failed(() => new deepl.DeepLClient('wrong', { serverUrl: url }).getUsage()),
  await failed(() => client.translateText('Hallo', 'de', 'en-US', { formality: 'more' })),
  await failed(() => client.getGlossary('00000000-0000-0000-0000-000000000000')),
  await failed(() => client.rephraseText('Hallo', 'de')),
];
console.log(JSON.stringify(found));

// The search when the guide is opened as files: there a browser refuses workers, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      frame.contentDocument.open();
      frame.contentDocument.write("<body></body>");
      frame.contentDocument.close();
      const inside = (this.inside = frame.contentWindow);
      const load = (src) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src, onload: resolve, onerror: reject });
          inside.document.body.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: this.inside.structuredClone(data) })));
    }
  };
}

//! A device in front of another: `delegate!` writes the methods named, which pass everything on to `self.inner`.
macro_rules! delegate {
    ($($name:ident)*) => { $(delegate!(@$name);)* };
    (@info) => { fn info(&self) -> &allhands::contract::Info { self.inner.info() } };
    (@limits) => { fn limits(&self) -> &allhands::contract::Limits { self.inner.limits() } };
    (@counters) => { fn counters(&self) -> allhands::contract::Counters { self.inner.counters() } };
    (@status) => { fn status(&self) -> allhands::contract::Result<()> { self.inner.status() } };
    (@create_buffer) => {
        fn create_buffer(&self, desc: &allhands::contract::BufferDesc)
            -> allhands::contract::Result<allhands::contract::BufferId> { self.inner.create_buffer(desc) }
    };
    (@destroy_buffer) => {
        fn destroy_buffer(&self, buffer: allhands::contract::BufferId) { self.inner.destroy_buffer(buffer) }
    };
    (@watch) => {
        fn watch(&self, watcher: std::sync::Weak<dyn allhands::contract::Watch>) { self.inner.watch(watcher) }
    };
    (@size) => {
        fn size(&self, buffer: allhands::contract::BufferId) -> allhands::contract::Result<u64> {
            self.inner.size(buffer)
        }
    };
    (@read) => {
        fn read(&self, from: allhands::contract::Range, to: &mut [u8]) -> allhands::contract::Result<()> {
            self.inner.read(from, to)
        }
    };
    (@write) => {
        fn write(&self, to: allhands::contract::Range, from: &[u8]) -> allhands::contract::Result<()> {
            self.inner.write(to, from)
        }
    };
    (@export) => {
        fn export(&self, buffer: allhands::contract::BufferId, kind: allhands::contract::SharedKind)
            -> allhands::contract::Result<allhands::contract::SharedMemory> { self.inner.export(buffer, kind) }
    };
    (@import) => {
        fn import(&self, memory: &allhands::contract::SharedMemory)
            -> allhands::contract::Result<allhands::contract::BufferId> { self.inner.import(memory) }
    };
    (@create_timeline) => {
        fn create_timeline(&self, shareable: bool) -> allhands::contract::Result<allhands::contract::TimelineId> {
            self.inner.create_timeline(shareable)
        }
    };
    (@destroy_timeline) => {
        fn destroy_timeline(&self, timeline: allhands::contract::TimelineId) { self.inner.destroy_timeline(timeline) }
    };
    (@value) => {
        fn value(&self, timeline: allhands::contract::TimelineId) -> allhands::contract::Result<u64> {
            self.inner.value(timeline)
        }
    };
    (@signal) => {
        fn signal(&self, point: allhands::contract::Point) -> allhands::contract::Result<()> {
            self.inner.signal(point)
        }
    };
    (@wait_any) => {
        fn wait_any(&self, points: &[allhands::contract::Point], wakes: u64, deadline: std::time::Instant)
            -> allhands::contract::Result<allhands::contract::Waited> { self.inner.wait_any(points, wakes, deadline) }
    };
    (@wakes) => { fn wakes(&self) -> u64 { self.inner.wakes() } };
    (@wake) => { fn wake(&self) { self.inner.wake() } };
    (@prepare) => {
        fn prepare(&self, ops: &[allhands::contract::Op])
            -> allhands::contract::Result<allhands::contract::CommandsId> { self.inner.prepare(ops) }
    };
    (@destroy_commands) => {
        fn destroy_commands(&self, commands: allhands::contract::CommandsId) { self.inner.destroy_commands(commands) }
    };
    (@submit) => {
        fn submit(&self, submissions: &[allhands::contract::Submission<'_>]) -> allhands::contract::Result<()> {
            self.inner.submit(submissions)
        }
    };
}
